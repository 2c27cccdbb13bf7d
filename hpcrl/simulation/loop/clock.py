"""The clock of a simulation: what happens next, and then."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Clock:
    """A queue of calls by time; calls of one moment run in the order in which they were asked for.

    Attributes
    ----------
    now:
        Simulated seconds since the start.
    calls:
        Calls made so far.
    stopped:
        Set to end `run` after the call that sets it.
    """

    __slots__ = ("_order", "_queue", "calls", "now", "stopped")

    def __init__(self) -> None:
        self.now, self.calls, self._order = 0.0, 0, 0
        self.stopped = False
        self._queue: list[tuple[float, int, Callable[[Any], None], Any]] = []

    def at(self, time_s: float, call: Callable[[Any], None], argument: Any = None) -> None:
        """Call ``call(argument)`` at ``time_s``, which is not in the past."""
        self._order += 1
        heappush(self._queue, (time_s, self._order, call, argument))

    def after(self, seconds: float, call: Callable[[Any], None], argument: Any = None) -> None:
        """Call ``call(argument)`` in ``seconds``."""
        self._order += 1
        heappush(self._queue, (self.now + seconds, self._order, call, argument))

    def forget(self) -> None:
        """Take every call back."""
        self._queue.clear()

    def run(self, until_s: float) -> None:
        """Make calls until ``until_s``, until `stopped`, or until there are none."""
        queue = self._queue
        while queue and not self.stopped:
            time_s = queue[0][0]
            if time_s > until_s:
                self.now = until_s
                return
            _, _, call, argument = heappop(queue)
            self.now = time_s
            self.calls += 1
            call(argument)
