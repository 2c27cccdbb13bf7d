"""Goes through the states of a recording and opens each; what tests and `tests/campaigns/power_cuts.py` share."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from durable_judges import JUDGES
from power_cut import PowerCuts, Rules, digest, write_tree
from recording import Kind, Operation


@dataclass
class Figures:
    """What was looked at, and what was wrong.

    Attributes
    ----------
    operations, cuts, states, opened:
        Of the recording; moments of cuts; states that were made; those of them that were not seen before.
    problems:
        One sentence each.
    """

    operations: int = 0
    cuts: int = 0
    states: int = 0
    opened: int = 0
    problems: list[str] = field(default_factory=list)


def sites(operations: Sequence[Operation]) -> set[str]:
    """Where in the code the fsyncs of a recording were asked for."""
    return {operation.site for operation in operations if operation.kind is Kind.SYNC}


def examine(
    scenario: str,
    operations: Sequence[Operation],
    *,
    rules: Rules = "posix",
    limit: int = 8,
    seed: int = 0,
    without: Collection[str] = (),
    most: int | None = None,
    first_only: bool = False,
) -> Figures:
    """Open the states of all cuts of a recording.

    Parameters
    ----------
    limit:
        Most states of one cut; up to that many are all looked at.
    most:
        Most states that are opened: then cuts are chosen at random, those right after a promise before all others.
    without:
        Sites whose fsyncs are left out.
    first_only:
        Stop at the first problem.
    """
    power = PowerCuts(operations, rules=rules, without=without)
    rng = random.Random(seed)
    figures = Figures(operations=len(operations))
    cuts = list(power.cuts)
    if most is not None:
        promises = [cut for before, cut in itertools.pairwise(cuts) if len(cut.marks) > len(before.marks)]
        others = [cut for cut in cuts if cut not in promises]
        rng.shuffle(others)
        cuts = promises + others
    seen: set[tuple[int, int]] = set()
    with _room() as room, _no_syncs():
        for cut in cuts:
            figures.cuts += 1
            for state in power.states(cut, limit=limit, rng=rng):
                figures.states += 1
                key = digest(state), len(cut.marks)
                if key in seen:
                    continue
                seen.add(key)
                figures.opened += 1
                where = room / str(figures.opened)
                write_tree(state, where / "root")
                try:
                    wrong = list(JUDGES[scenario](where / "root", cut, where / "other"))
                except Exception as error:  # noqa: BLE001 - whatever it is, the next attempt would meet it
                    wrong = [f"{type(error).__name__}: {error}"]
                finally:
                    shutil.rmtree(where)
                said = cut.marks[-1] if cut.marks else "the beginning"
                figures.problems += [f"cut after operation {cut.at} ({said}): {problem}" for problem in wrong]
                if first_only and wrong:
                    return figures
                if most is not None and figures.opened >= most:
                    return figures
    return figures


@contextmanager
def _room() -> Iterator[Path]:
    """A directory in memory, where there is one: thousands of small trees are made and removed."""
    memory = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(prefix="power-cuts-", dir=memory if os.access(memory, os.W_OK) else None))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _no_syncs() -> Iterator[None]:
    """Judges open states and throw them away: what they write need not be durable."""
    real = os.fsync
    os.fsync = lambda fd: None
    before = os.umask(0o077)  # modes are not recorded: some files must be for their owner alone
    try:
        yield
    finally:
        os.umask(before)
        os.fsync = real
