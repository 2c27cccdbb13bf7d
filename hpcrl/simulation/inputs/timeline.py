"""Times of work in a measured run."""

from __future__ import annotations

from bisect import bisect, bisect_left
from collections.abc import Sequence
from itertools import accumulate
from math import inf
from typing import NamedTuple


class Interval(NamedTuple):
    """An interval of the wall clock."""

    begin_s: float
    end_s: float


class Busy:
    """Number of intervals that cover a moment, as an integral over time."""

    def __init__(self, intervals: Sequence[Interval]) -> None:
        changes = sorted([(begin, 1) for begin, _ in intervals] + [(end, -1) for _, end in intervals])
        self._times = [time for time, _ in changes]
        self._levels = [0, *accumulate(change for _, change in changes)]
        areas = (
            level * (later - time)
            for time, later, level in zip(self._times, self._times[1:], self._levels[1:], strict=False)
        )
        self._areas = [0.0, *accumulate(areas)]

    def integral(self, interval: Interval) -> float:
        """Return the integral over an interval, in seconds."""
        return self._until(interval.end_s) - self._until(interval.begin_s)

    def mean(self, interval: Interval) -> float:
        """Return the mean over an interval."""
        return self.integral(interval) / max(interval.end_s - interval.begin_s, 1e-9)

    def _until(self, time_s: float) -> float:
        i = bisect(self._times, time_s)
        return 0.0 if i == 0 else self._areas[i - 1] + self._levels[i] * (time_s - self._times[i - 1])


class Arrivals:
    """Tokens that came at some moments."""

    def __init__(self, arrivals: Sequence[tuple[float, int]]) -> None:
        ordered = sorted(arrivals)
        self._times = [time for time, _ in ordered]
        self._tokens = [0, *accumulate(tokens for _, tokens in ordered)]

    def tokens(self, interval: Interval) -> int:
        """Return the tokens that came in an interval, both ends included."""
        return (
            self._tokens[bisect(self._times, interval.end_s)] - self._tokens[bisect_left(self._times, interval.begin_s)]
        )


class Kind(NamedTuple):
    """One kind of work: when, how many workers each interval stands for, and how many there are at most."""

    intervals: Sequence[Interval]
    each: float = 1.0
    most: float = inf


class Crowd:
    """Times of all work on one machine, from which the duration of work without contention follows."""

    def __init__(self, kinds: Sequence[Kind], cpus: float) -> None:
        """Take all kinds of work.

        Parameters
        ----------
        cpus:
            CPUs of the machine; 0: all work has its own CPUs.
        """
        changes: list[tuple[float, float]] = []
        for intervals, each, most in kinds:
            level = 0
            for time, change in sorted([(begin, 1) for begin, _ in intervals] + [(end, -1) for _, end in intervals]):
                changes.append((time, min(most, each * (level + change)) - min(most, each * level)))
                level += change
        changes.sort()
        self._times = [time for time, _ in changes]
        self._levels = [0.0, *accumulate(change for _, change in changes)]
        self._rates = [min(1.0, cpus / level) if cpus and level > 1e-9 else 1.0 for level in self._levels]
        areas = (
            rate * (later - time)
            for time, later, rate in zip(self._times, self._times[1:], self._rates[1:], strict=False)
        )
        self._areas = [0.0, *accumulate(areas)]

    def alone(self, interval: Interval) -> float:
        """Return the seconds that the work of an interval takes alone."""
        return max(0.0, self._until(interval.end_s) - self._until(interval.begin_s))

    def _until(self, time_s: float) -> float:
        i = bisect(self._times, time_s)
        if i == 0:
            return time_s - self._times[0] if self._times else time_s
        return self._areas[i - 1] + self._rates[i] * (time_s - self._times[i - 1])
