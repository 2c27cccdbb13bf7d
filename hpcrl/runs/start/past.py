"""What still counts of earlier attempts: the past that led to the checkpoint from which the newest one goes on.

An attempt that restores step N takes back all that came after N, also what an attempt that was thought dead writes
later. Each attempt has files of its own, and readers ask here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from hpcrl.runs.rundir import RunDir
from hpcrl.runs.start.restart import read_restored

__all__ = ["Past", "Start", "read_past"]


class Start(NamedTuple):
    """Where an attempt began.

    Attributes
    ----------
    step:
        Restored step; 0 for the start model.
    saved_by:
        Attempt that saved what it restored; None where that is not known, or there was none.
    """

    step: int
    saved_by: int | None = None


class Past:
    """Which steps of which attempts are a part of the run."""

    def __init__(self, starts: Mapping[int, Start]) -> None:
        """From the start of each attempt that is known."""
        self.starts = dict(starts)
        self._last: dict[int, float] = {}
        limit: float = math.inf
        attempt = max(self.starts, default=None)
        while attempt is not None:
            self._last[attempt] = limit
            start = self.starts[attempt]
            limit = min(limit, start.step)
            earlier = [other for other in self.starts if other < attempt]
            attempt = start.saved_by if start.saved_by in earlier else max(earlier, default=None)

    def holds(self, attempt: int, step: int) -> bool:
        """Whether what ``attempt`` says about ``step`` is a part of the run, or of a past that was given up.

        Nothing is taken back by attempts that have not begun yet, or of which nothing is known.
        """
        if not self.starts:
            return True
        if attempt not in self.starts:  # of an earlier version, without a decision on record
            later = [start.step for number, start in self.starts.items() if number > attempt]
            return step <= min(later, default=math.inf)
        return step <= self._last.get(attempt, -1)


def read_past(run: RunDir) -> Past:
    """Read what trainers have decided; attempts that began with nothing, or have not decided yet, change nothing."""
    starts = {}
    for attempt in run.attempts():
        decision = read_restored(run, attempt)
        if decision is not None and not decision.refused:
            starts[attempt] = Start(decision.step or 0, decision.saved_by)
    return Past(starts)
