"""Lag of the event loop: the delay with which a short sleep returns."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import NamedTuple

_PERIOD_S = 0.01
_WINDOW = 6000


class LagSummary(NamedTuple):
    """Delays in seconds; ``p50`` and ``p99`` over the last minute, ``max`` since the start."""

    p50_s: float
    p99_s: float
    max_s: float


class LagMonitor:
    """Measures for as long as `run` runs."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=_WINDOW)
        self._max_s = 0.0

    async def run(self) -> None:
        """Measure a hundred times a second; never return."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(_PERIOD_S)
            lag = max(0.0, time.monotonic() - before - _PERIOD_S)
            self._samples.append(lag)
            self._max_s = max(self._max_s, lag)

    def reset(self) -> None:
        """Discard the samples so far."""
        self._samples.clear()
        self._max_s = 0.0

    def summary(self) -> LagSummary:
        """Return the summary of the samples so far; zeros before the first sample."""
        ordered = sorted(self._samples) or [0.0]
        return LagSummary(ordered[len(ordered) // 2], ordered[int(0.99 * (len(ordered) - 1))], self._max_s)
