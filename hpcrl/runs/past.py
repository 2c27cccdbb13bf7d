"""Valid history of earlier attempts: the steps that led to the checkpoint from which the newest attempt continues.

An attempt that restores step N invalidates all records of later steps, also those that an earlier attempt which was
presumed dead writes afterwards. Each attempt has its own files, and readers ask this module which records are valid.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from hpcrl.runs.resume_request import read_restored
from hpcrl.runs.rundir import RunDir


class Start(NamedTuple):
    """Start of an attempt.

    Attributes
    ----------
    step:
        Restored step; 0 for the start model.
    saved_by:
        Attempt that saved the restored checkpoint; None where it is unknown, or none was restored.
    """

    step: int
    saved_by: int | None = None


class Past:
    """Steps of each attempt that belong to the run's history."""

    def __init__(self, starts: Mapping[int, Start]) -> None:
        """Take the start of each known attempt."""
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
        """Return whether records of ``attempt`` about ``step`` belong to the run's history and were not abandoned.

        Attempts that have not begun yet, or about which nothing is known, abandon nothing.
        """
        if not self.starts:
            return True
        if attempt not in self.starts:  # an attempt of an earlier version, without a recorded decision
            later = [start.step for number, start in self.starts.items() if number > attempt]
            return step <= min(later, default=math.inf)
        return step <= self._last.get(attempt, -1)


def read_past(run: RunDir) -> Past:
    """Read the decisions of trainers; attempts that restored nothing, or have not decided yet, change nothing."""
    starts = {}
    for attempt in run.attempts():
        decision = read_restored(run, attempt)
        if decision is not None and not decision.refused:
            starts[attempt] = Start(decision.step or 0, decision.saved_by)
    return Past(starts)
