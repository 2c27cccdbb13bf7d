"""Distributions as quantiles: the planner integrates over them, the simulator draws from them.

A distribution is a list of equally likely values in rising order. Every mean below is a mean over that list, so a
log-normal, a measured histogram and a constant are one thing.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

POINTS = 256
"""Values that stand for a distribution; the mean of a log-normal with sigma 1 is then right within 1 %."""


@dataclass(frozen=True, slots=True)
class Quantiles:
    """A distribution of non-negative values.

    Attributes
    ----------
    values:
        Equally likely, in rising order, at least one.
    """

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("a distribution needs at least one value")
        if self.values[0] < 0 or list(self.values) != sorted(self.values):
            raise ValueError("values of a distribution must be non-negative and in rising order")

    @classmethod
    def of(cls, values: Sequence[float]) -> Quantiles:
        """Return quantiles from measured values in any order; more than `POINTS` are thinned out."""
        ordered = sorted(values)
        if len(ordered) > POINTS:
            ordered = [ordered[(2 * i + 1) * len(ordered) // (2 * POINTS)] for i in range(POINTS)]
        return cls(tuple(map(float, ordered)))

    @property
    def mean(self) -> float:
        """Return the expected value."""
        return math.fsum(self.values) / len(self.values)

    @property
    def deviation(self) -> float:
        """Return the standard deviation."""
        mean = self.mean
        return math.sqrt(math.fsum((value - mean) ** 2 for value in self.values) / len(self.values))

    def average(self, function: Callable[[float], float]) -> float:
        """Return the expected value of ``function``."""
        return math.fsum(function(value) for value in self.values) / len(self.values)

    def quantile(self, share: float) -> float:
        """Return the value that ``share`` of the distribution is below (linear between the stored ones)."""
        return self._between((_place(len(self.values), share),))[0]

    def above(self, value: float) -> float:
        """Share of the distribution above ``value``."""
        return 1.0 - bisect_right(self.values, value) / len(self.values)

    def largest_of(self, count: float) -> float:
        """Return the expected largest of ``count`` independent values.

        The largest of n is below x with probability ``F(x)^n``: each stored value is the largest with the
        probability mass ``(i/m)^n - ((i-1)/m)^n``.
        """
        total = 0.0
        for value, mass in zip(self.values, _largest_masses(len(self.values), count), strict=True):
            total += value * mass
        return total

    def largest(self, count: int) -> Quantiles:
        """Return the distribution of the largest of ``count`` independent values."""
        if count == 1:
            return self
        return Quantiles(tuple(self._between(_largest_places(len(self.values), count))))

    def mapped(self, function: Callable[[float], float]) -> Quantiles:
        """Return the distribution of ``function`` of the value; the function must not fall."""
        return Quantiles(tuple(function(value) for value in self.values))

    def sample(self, count: int) -> list[float]:
        """Return ``count`` values that stand for the distribution: its midpoints, not random ones."""
        return self._between(_midpoints(len(self.values), count))

    def _between(self, places: Sequence[_Place]) -> list[float]:
        values = self.values
        return [values[low] + part * (values[high] - values[low]) for low, high, part in places]


_Place = tuple[int, int, float]
"""Place of a quantile: the two stored values around it, and the distance from the lower one (0 to 1)."""


def _place(size: int, share: float) -> _Place:
    """Return the place of the value that ``share`` of a distribution of ``size`` values is below."""
    position = min(max(share, 0.0), 1.0) * size - 0.5
    low = min(max(math.floor(position), 0), size - 1)
    return low, min(low + 1, size - 1), min(max(position - low, 0.0), 1.0)


# the planner uses the same few sizes and counts thousands of times


@lru_cache(maxsize=64)
def _midpoints(size: int, count: int) -> tuple[_Place, ...]:
    return tuple(_place(size, (2 * i + 1) / (2 * count)) for i in range(count))


@lru_cache(maxsize=64)
def _largest_places(size: int, count: int) -> tuple[_Place, ...]:
    return tuple(_place(size, ((2 * i + 1) / (2 * size)) ** (1.0 / count)) for i in range(size))


@lru_cache(maxsize=64)
def _largest_masses(size: int, count: float) -> tuple[float, ...]:
    """Return the probability of each stored value to be the largest of ``count``."""
    masses, below = [], 0.0
    for i in range(1, size + 1):
        up_to = (i / size) ** count
        masses.append(up_to - below)
        below = up_to
    return tuple(masses)


def expected_later(a: float, b: float, deviation: float) -> float:
    """Return the expected later of a fixed time ``a`` and a normal one with mean ``b`` (Clark, 1961).

    ``a Φ(d) + b Φ(-d) + σ φ(d)`` with ``d = (a - b) / σ``.
    """
    if deviation <= 0:
        return max(a, b)
    d = (a - b) / deviation
    normal = NormalDist()
    return a * normal.cdf(d) + b * normal.cdf(-d) + deviation * normal.pdf(d)
