"""Distributions as quantiles: the planner integrates over them, the simulator draws from them.

A distribution is a list of equally likely values in rising order. Every mean below is a mean over that list, so a
log-normal, a measured histogram and a constant are one thing.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

__all__ = ["POINTS", "Quantiles", "expected_later"]

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
        if self.values[0] < 0 or any(a > b for a, b in zip(self.values, self.values[1:], strict=False)):
            raise ValueError("values of a distribution must be non-negative and in rising order")

    @classmethod
    def of(cls, values: Sequence[float]) -> Quantiles:
        """From measured values in any order; more than `POINTS` are thinned out."""
        ordered = sorted(values)
        if len(ordered) > POINTS:
            ordered = [ordered[(2 * i + 1) * len(ordered) // (2 * POINTS)] for i in range(POINTS)]
        return cls(tuple(float(value) for value in ordered))

    @property
    def mean(self) -> float:
        """Expected value."""
        return math.fsum(self.values) / len(self.values)

    @property
    def deviation(self) -> float:
        """Standard deviation."""
        mean = self.mean
        return math.sqrt(math.fsum((value - mean) ** 2 for value in self.values) / len(self.values))

    def average(self, function: Callable[[float], float]) -> float:
        """Expected value of ``function``."""
        return math.fsum(function(value) for value in self.values) / len(self.values)

    def quantile(self, share: float) -> float:
        """The value that ``share`` of the distribution is below (linear between the stored ones)."""
        position = min(max(share, 0.0), 1.0) * len(self.values) - 0.5
        low = min(max(math.floor(position), 0), len(self.values) - 1)
        high = min(low + 1, len(self.values) - 1)
        part = min(max(position - low, 0.0), 1.0)
        return self.values[low] + part * (self.values[high] - self.values[low])

    def above(self, value: float) -> float:
        """Share of the distribution above ``value``."""
        return 1.0 - bisect_right(self.values, value) / len(self.values)

    def largest_of(self, count: float) -> float:
        """Expected largest of ``count`` independent values.

        The largest of n is below x with probability ``F(x)^n``: each stored value is the largest with the
        probability mass ``(i/m)^n - ((i-1)/m)^n``.
        """
        size = len(self.values)
        total, below = 0.0, 0.0
        for i, value in enumerate(self.values, start=1):
            up_to = (i / size) ** count
            total += value * (up_to - below)
            below = up_to
        return total

    def largest(self, count: int) -> Quantiles:
        """The distribution of the largest of ``count`` independent values."""
        if count == 1:
            return self
        size = len(self.values)
        return Quantiles(tuple(self.quantile(((2 * i + 1) / (2 * size)) ** (1.0 / count)) for i in range(size)))

    def mapped(self, function: Callable[[float], float]) -> Quantiles:
        """The distribution of ``function`` of the value; it must not fall."""
        return Quantiles(tuple(function(value) for value in self.values))

    def sample(self, count: int) -> list[float]:
        """``count`` values that stand for the distribution: its midpoints, not random ones."""
        return [self.quantile((2 * i + 1) / (2 * count)) for i in range(count)]


def expected_later(a: float, b: float, deviation: float) -> float:
    """Expected later of a fixed time ``a`` and a normal one with mean ``b`` (Clark, 1961).

    ``a Φ(d) + b Φ(-d) + σ φ(d)`` with ``d = (a - b) / σ``.
    """
    if deviation <= 0:
        return max(a, b)
    d = (a - b) / deviation
    normal = NormalDist()
    return a * normal.cdf(d) + b * normal.cdf(-d) + deviation * normal.pdf(d)
