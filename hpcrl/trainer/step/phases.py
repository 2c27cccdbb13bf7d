"""Measures the phases of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from hpcrl.runs.progress import ProgressReporter

PHASES = ("wait_batch", "forward_backward", "optimizer", "publish", "checkpoint")
"""Phases that are measured; ``other`` is what is left of the step. Where trainer and engines take turns there is
``swap`` as well."""


_WAITING = "wait_batch"
"""Phase in which the trainer waits for others."""


_TURNS = {_WAITING: "generate", "swap": "swap"}


class PhaseClock:
    """Measures the phases of one step; the step begins when the clock is made.

    ``progress`` is called with each phase as it begins; with ``turns`` it also gets whose turn it is: engines
    ``generate``, the devices are swapped, or the trainer trains. ``span`` makes the context in which a phase runs.
    """

    def __init__(
        self,
        progress: ProgressReporter | None = None,
        *,
        turns: bool = False,
        span: Callable[[str], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._progress, self._turns, self._span = progress, turns, span
        self._start = time.monotonic()
        self._seconds = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time inside to phase ``name``."""
        start = time.monotonic()
        words = _TURNS.get(name, f"train ({name})") if self._turns else name
        told = nullcontext() if self._progress is None else self._progress.phase(words, waits=name == _WAITING)
        try:
            with told, self._span(name):
                yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - start

    def seconds(self) -> dict[str, float]:
        """Return the seconds by phase until now; with ``other`` they add up to the step."""
        other = time.monotonic() - self._start - sum(self._seconds.values())
        return {**self._seconds, "other": max(other, 0.0)}
