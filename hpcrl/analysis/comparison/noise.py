"""Intervals of held-out means, of their differences, and of differences between groups of runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from hpcrl.analysis.student import student_quantile

_Z = 1.959963984540054
"""The 97.5 % quantile of the normal distribution."""


class Bounded(NamedTuple):
    """A mean with the ends of its 95 % interval."""

    value: float
    low: float
    high: float


class NoiseVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Verdict on a difference of held-out rewards: more than noise, or not.

    Attributes
    ----------
    first, second:
        Labels of the runs on each side.
    step:
        Step at which they are compared.
    difference, low, high:
        Mean of ``second`` minus mean of ``first``, and its 95 % interval; None where it is unknown.
    more_than_noise:
        Whether the interval excludes 0; None where there is no interval.
    noise:
        ``seeds``: the spread between runs of equal settings. ``evaluation``: which prompts and tokens were drawn; the
        spread between seeds is unknown then.
    method:
        Computation of the interval, with all counts.
    """

    first: list[str]
    second: list[str]
    step: int | None
    difference: float | None
    low: float | None
    high: float | None
    more_than_noise: bool | None
    noise: str
    method: str


def wilson_interval(mean: float, count: int) -> tuple[float, float] | None:
    """Return the 95 % score interval of a mean of ``count`` rewards between 0 and 1 (Wilson 1927).

    It is that of a share. Rewards between 0 and 1 with mean ``m`` have a variance of at most ``m (1 - m)``, so that the
    interval of other rewards is wider than needed. None without a reward, or where the mean is not between 0 and 1.
    """
    if count < 1 or not 0.0 <= mean <= 1.0:
        return None
    scale = 1.0 + _Z * _Z / count
    middle = (mean + _Z * _Z / (2 * count)) / scale
    half = _Z / scale * math.sqrt(mean * (1.0 - mean) / count + _Z * _Z / (4 * count * count))
    return max(0.0, middle - half), min(1.0, middle + half)


def difference_interval(first: Bounded, second: Bounded) -> tuple[float, float]:
    """Return the 95 % interval of ``second - first`` from the intervals of two independent means.

    It is the method of variance estimates recovery (Newcombe 1998; Zou and Donner 2008), which keeps the skew of both.
    """
    difference = second.value - first.value
    below = math.hypot(second.value - second.low, first.high - first.value)
    above = math.hypot(second.high - second.value, first.value - first.low)
    return difference - below, difference + above


def pooled_interval(first: Sequence[float], second: Sequence[float]) -> tuple[float, float, int] | None:
    """Return the 95 % interval of the difference of two groups' means, and its degrees of freedom (Student).

    The spread is pooled over both groups, and one of them may be a single run. None where neither has two.
    """
    freedom = len(first) + len(second) - 2
    if freedom < 1 or not first or not second:
        return None
    means = [math.fsum(group) / len(group) for group in (first, second)]
    squares = math.fsum(
        (value - mean) ** 2 for group, mean in zip((first, second), means, strict=True) for value in group
    )
    half = student_quantile(freedom) * math.sqrt(squares / freedom * (1 / len(first) + 1 / len(second)))
    difference = means[1] - means[0]
    return difference - half, difference + half, freedom
