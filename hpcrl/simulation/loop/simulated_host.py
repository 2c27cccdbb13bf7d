"""Roles that share the CPUs of one machine: processor sharing, so that who works slows the others down."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from hpcrl.simulation.inputs.durations import SharingDurations
from hpcrl.simulation.loop.clock import Clock

_EPSILON = 1e-9


class Host:
    """Host that runs pieces of work, on separate CPUs or on shared ones.

    On shared CPUs all of ``n`` pieces go on at ``min(1, cpus / n)`` of their speed alone. So one clock of work counts
    for all of them, and a piece ends when that clock has moved by its seconds: O(log n) for each that begins or ends.

    Attributes
    ----------
    shared:
        Whether work shares CPUs and slows down.
    """

    def __init__(self, clock: Clock, sharing: SharingDurations, hosts: float) -> None:
        """Begin without work; the simulated roles run on ``hosts`` such machines."""
        self._clock, self._cpus = clock, sharing.cpus * max(1.0, hosts)
        self.shared = sharing.cpus > 0
        self._at_work, self._order, self._epoch = 0, 0, 0
        self._work, self._rate, self._last_s = 0.0, 1.0, clock.now
        self._jobs: list[tuple[float, int, int, Callable[[Any], None], Any]] = []
        self._set_speed: Callable[[float], None] | None = None

    def attach(self, set_speed: Callable[[float], None]) -> None:
        """Attach engines that run here; ``set_speed`` is called with their share of the speed that they have alone."""
        self._set_speed = set_speed

    def run(self, seconds: float, then: Callable[[Any], None], argument: Any = None, *, threads: int = 1) -> None:
        """Call ``then(argument)`` after work that takes ``seconds`` alone, on ``threads`` CPUs."""
        if not self.shared or seconds <= 0.0:
            self._clock.after(max(0.0, seconds), then, argument)
            return
        self._advance()
        self._order += 1
        heappush(self._jobs, (self._work + seconds, self._order, threads, then, argument))
        self._change(threads)

    def engine_works(self, change: int) -> None:
        """Record that an engine has begun (1) or stopped (-1) to compute."""
        if self.shared:
            self._advance()
            self._change(change)

    def _advance(self) -> None:
        now = self._clock.now
        self._work += self._rate * (now - self._last_s)
        self._last_s = now

    def _change(self, change: int) -> None:
        """Change the number of active pieces of work."""
        self._at_work += change
        rate = min(1.0, self._cpus / max(self._at_work, 1))
        slower = rate != self._rate
        self._rate = rate
        if slower and self._set_speed is not None:
            self._set_speed(rate)
        self._plan()

    def _plan(self) -> None:
        self._epoch += 1
        if self._jobs:
            self._clock.after(max(0.0, self._jobs[0][0] - self._work) / self._rate, self._end, self._epoch)

    def _end(self, epoch: int) -> None:
        if epoch != self._epoch:
            return
        self._advance()
        ended: list[tuple[Callable[[Any], None], Any]] = []
        freed = 0
        while self._jobs and self._jobs[0][0] <= self._work + _EPSILON:
            _, _, threads, then, argument = heappop(self._jobs)
            freed += threads
            ended.append((then, argument))
        self._change(-freed)
        for then, argument in ended:
            then(argument)


class SerialProcess:
    """One process that does one thing after the other: the orchestrator's event loop."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._queue: deque[tuple[float, Callable[[Any], None], Any]] = deque()
        self._busy = False

    def run(self, seconds: float, then: Callable[[Any], None], argument: Any) -> None:
        """Call ``then(argument)`` after ``seconds`` of work, in turn."""
        self._queue.append((seconds, then, argument))
        if not self._busy:
            self._next()

    def _next(self) -> None:
        self._busy = True
        seconds, then, argument = self._queue.popleft()
        self._host.run(seconds, self._done, (then, argument))

    def _done(self, call: tuple[Callable[[Any], None], Any]) -> None:
        self._busy = False
        if self._queue:
            self._next()
        then, argument = call
        then(argument)
