"""Tries mutants with the nearest files of tests first, and records nothing before."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mutation import trials
from mutation.nearness import Nearness
from mutation.operators import Mutant

_PART = (2, 4, 12)
"""How many files one process runs, from the nearest on; the last number holds for all others."""
_LEAST_S = 30.0
"""Timeout in seconds of a process that begins shortly before the time of its mutant is over."""


@dataclass
class NearTests:
    """Tries mutants with files of tests, the nearest first, without a record of what these execute.

    Attributes
    ----------
    passing:
        Tests that were seen to pass without a mutant.
    failing:
        Tests that were seen to fail without a mutant, which say nothing.
    """

    tree: Path
    scratch: Path
    box_s: float
    passing: set[str] = field(default_factory=set)
    failing: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._nearness = Nearness(self.tree)

    def judge(self, mutant: Mutant, files: Sequence[str]) -> tuple[str, str, float]:
        """Try one mutant until a test sees it, for ``box_s`` seconds at most, or until all files have run.

        To ``files``, those of its room, come all that import what it changes.
        """
        began_s, taken = time.monotonic(), 0
        wanted = list(dict.fromkeys([*files, *self._nearness.importers(mutant.path)]))
        order = self._nearness.order(mutant.path, mutant.function, wanted)
        deadline = began_s + self.box_s
        for number in range(len(order)):
            part = order[taken : taken + _PART[min(number, len(_PART) - 1)]]
            if not part or time.monotonic() > deadline:
                break
            trial = self._seen(mutant, part, deadline)
            if trial is not None:
                seconds = time.monotonic() - began_s
                return ("stopped", part[0], seconds) if trial.code is None else ("caught", trial.failed, seconds)
            taken += len(part)
        tried = f"in {min(taken, len(order))} of {len(order)} files"
        return "survived", tried, time.monotonic() - began_s

    def _seen(self, mutant: Mutant, part: Sequence[str], deadline: float) -> trials.Trial | None:
        """Return the trial that ended by the mutant; None where all tests pass, or fail without the mutant too."""
        while files := [file for file in part if file not in self.failing]:
            limit_s = max(_LEAST_S, deadline - time.monotonic())
            with trials.changed(mutant, self.tree):
                trial = trials.run_files(self.tree, files, self.scratch, limit_s, self.failing)
            if trial.code in (0, 5):
                return None
            if trial.code is None:
                return trial if self._ends_without(files, limit_s) else None
            if self._passes_without(trial.failed, files, limit_s):
                return trial
            if time.monotonic() > deadline:
                return None
        return None

    def _ends_without(self, files: Sequence[str], limit_s: float) -> bool:
        """Return whether tests that did not end do without the mutant, in half of the time: the machine may be busy."""
        again = trials.run_files(self.tree, files, self.scratch, limit_s / 2, self.failing)
        return again.code is not None

    def _passes_without(self, failed: str, files: Sequence[str], limit_s: float) -> bool:
        wanted = [failed] if failed else list(files)
        if not self.passing.issuperset(wanted):
            again = trials.run_files(self.tree, wanted, self.scratch, limit_s)
            (self.passing if again.code == 0 else self.failing).update(wanted)
        return self.passing.issuperset(wanted)
