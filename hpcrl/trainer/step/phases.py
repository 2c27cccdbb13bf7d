"""Where the time of a step goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from hpcrl.runs.progress import ProgressReporter

__all__ = ["PHASES", "PhaseClock"]

PHASES = ("wait_batch", "forward_backward", "optimizer", "publish", "checkpoint")
"""Phases that are measured; ``other`` is what is left of the step. Where trainer and engines take turns there is
``swap`` as well."""


_WAITING = "wait_batch"
"""The phase in which the trainer is not the one that must do something."""


_TURNS = {_WAITING: "generate", "swap": "swap"}


class PhaseClock:
    """Measures the phases of one step; the step begins when the clock is made.

    ``progress`` is told of each phase as it begins; with ``turns`` it is told whose turn it is: engines ``generate``,
    the devices are swapped, or the trainer trains.
    """

    def __init__(self, progress: ProgressReporter | None = None, *, turns: bool = False) -> None:
        self._progress, self._turns = progress, turns
        self._start = time.monotonic()
        self._seconds = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time inside to phase ``name``."""
        start = time.monotonic()
        words = _TURNS.get(name, f"train ({name})") if self._turns else name
        told = nullcontext() if self._progress is None else self._progress.phase(words, waits=name == _WAITING)
        try:
            with told:
                yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - start

    def seconds(self) -> dict[str, float]:
        """Seconds by phase until now; with ``other`` they add up to the step."""
        other = time.monotonic() - self._start - sum(self._seconds.values())
        return {**self._seconds, "other": max(other, 0.0)}
