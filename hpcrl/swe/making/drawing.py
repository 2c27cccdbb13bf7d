"""Draws bugs of a package: which functions get which changes, from a seed alone."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from hpcrl.swe.making.measuring import MeasuredPackage
from hpcrl.swe.making.mutations import Bug, SourceFile, SourceFunction, mutate
from hpcrl.swe.making.packages import SourcePackage
from hpcrl.swe.trees import Tree

_EDITS = (1, 2, 3, 4)
_WEIGHTS = (30, 30, 25, 15)
_REMOVED = 0.15
"""Share of the candidates in which functions are removed."""
_TRIES = 20


def drawn_share(*parts: str) -> float:
    """Return a number from 0 to 1 that depends on its arguments alone."""
    digest = hashlib.sha256("\0".join(parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2.0**64


@dataclass(frozen=True, slots=True)
class SeededVersion:
    """A package with bugs.

    Attributes
    ----------
    number:
        Number of the candidate in its package.
    split:
        Split of its functions: for training or held out.
    changes:
        Text of the changed files, by path.
    bugs:
        Bugs that were put in.
    tests:
        Ids of the tests that call a changed function.
    """

    number: int
    split: Literal["train", "heldout"]
    changes: dict[str, str]
    bugs: tuple[Bug, ...]
    tests: tuple[str, ...]

    @property
    def weight(self) -> int:
        """Return the amount to mend: 1 for each edit, 3 for a removed function."""
        return sum(3 if bug.kind == "removed" else 1 for bug in self.bugs)


class BugDrawer:
    """Draws candidates of one package."""

    def __init__(
        self,
        package: SourcePackage,
        tree: Tree,
        measured: MeasuredPackage,
        *,
        seed: int,
        held_out_share: float,
        held_out: bool,
    ) -> None:
        """Read the source code.

        Parameters
        ----------
        held_out_share:
            Share of the functions that are held out, chosen by a hash of their names.
        held_out:
            All functions are held out.
        """
        self._package, self._measured, self._seed = package, measured, seed
        self._files: dict[str, SourceFile] = {}
        self._functions: dict[str, list[SourceFunction]] = {"train": [], "heldout": []}
        self._tests: dict[tuple[str, str], tuple[int, ...]] = {}
        for path in sorted(tree):
            if not self._is_source(path):
                continue
            try:
                file = SourceFile(path, tree[path].content.decode())
            except UnicodeDecodeError:
                continue
            self._files[path] = file
            for function in file.functions:
                if callers := self._callers(function):
                    hashed = drawn_share("split", package.pinned.name, path, function.name)
                    split = "heldout" if held_out or hashed < held_out_share else "train"
                    self._functions[split].append(function)
                    self._tests[path, function.name] = callers
        self._shares = {split: len(functions) for split, functions in self._functions.items()}

    def _is_source(self, path: str) -> bool:
        if not path.endswith(".py") or "tests" in PurePosixPath(path).parts or path in self._package.tests:
            return False
        return any(PurePosixPath(path).is_relative_to(each) for each in self._package.source)

    def _callers(self, function: SourceFunction) -> tuple[int, ...]:
        """Return positions of the tests that call a function, or one inside of it."""
        end = function.node.end_lineno or function.line
        found: set[int] = set()
        for line in range(function.line, end + 1):
            key = f"{function.path}:{line}"
            if key in self._measured.imported and line == function.line:
                return tuple(range(len(self._measured.tests)))
            found.update(self._measured.callers.get(key, ()))
        return tuple(sorted(found))

    def draw(self, number: int) -> SeededVersion | None:
        """Return candidate ``number``; None where nothing was found for it."""
        rng = random.Random(f"{self._seed}/{self._package.pinned.name}/{number}")
        total = sum(self._shares.values())
        if not total:
            return None
        split: Literal["train", "heldout"] = "train" if rng.random() * total < self._shares["train"] else "heldout"
        functions = self._functions[split]
        remove = rng.random() < _REMOVED
        wanted = rng.choice((1, 1, 2)) if remove else rng.choices(_EDITS, _WEIGHTS)[0]
        by_file: dict[str, list[Bug]] = {}
        chosen: set[tuple[str, str]] = set()
        for _ in range(_TRIES):
            function = rng.choice(functions)
            place = function.path, function.name
            bug = mutate(self._files[function.path], function, rng, remove=remove)
            if place in chosen or bug is None:
                continue
            chosen.add(place)
            by_file.setdefault(function.path, []).append(bug)
            if len(chosen) == min(wanted, len(functions)):
                break
        return self._candidate(number, split, by_file, chosen)

    def _candidate(
        self,
        number: int,
        split: Literal["train", "heldout"],
        by_file: Mapping[str, list[Bug]],
        chosen: Collection[tuple[str, str]],
    ) -> SeededVersion | None:
        changes: dict[str, str] = {}
        for path, bugs in sorted(by_file.items()):
            text = self._files[path].changed(bugs)
            if text is None:
                return None
            changes[path] = text
        if not changes:
            return None
        positions = sorted({position for place in chosen for position in self._tests[place]})
        tests = tuple(self._measured.tests[position] for position in positions)
        all_bugs = tuple(bug for path in sorted(by_file) for bug in by_file[path])
        return SeededVersion(number, split, changes, all_bugs, tests)
