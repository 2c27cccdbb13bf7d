"""Distributions as quantiles."""

from __future__ import annotations

import math
import random
from statistics import mean

import pytest

from hpcrl.planning.times.lengths import Quantiles, expected_later, lognormal


def test_a_log_normal_has_its_moments() -> None:
    distribution = lognormal(100.0, 0.5)
    assert distribution.mean == pytest.approx(100 * math.exp(0.125), rel=5e-3)
    assert distribution.quantile(0.5) == pytest.approx(100.0, rel=5e-3)
    assert distribution.quantile(0.975) == pytest.approx(100 * math.exp(0.5 * 1.96), rel=0.02)
    assert distribution.above(100.0) == pytest.approx(0.5, abs=0.01)


def test_a_maximum_cuts() -> None:
    distribution = lognormal(100.0, 1.0, 150.0)
    assert distribution.values[-1] == 150.0
    assert distribution.mean < lognormal(100.0, 1.0).mean


@pytest.mark.parametrize("count", [1, 4, 64])
def test_the_largest_of_many_is_as_in_a_simulation(count: int) -> None:
    distribution = lognormal(10.0, 0.6)
    rng = random.Random(0)
    drawn = mean(max(rng.choice(distribution.values) for _ in range(count)) for _ in range(4000))
    assert distribution.largest_of(count) == pytest.approx(drawn, rel=0.03)
    assert distribution.largest(count).mean == pytest.approx(drawn, rel=0.05)


def test_measured_values_are_thinned_not_shifted() -> None:
    rng = random.Random(1)
    values = [rng.expovariate(1.0) for _ in range(10_000)]
    assert Quantiles.of(values).mean == pytest.approx(mean(values), rel=0.03)


def test_values_must_rise() -> None:
    with pytest.raises(ValueError, match="rising"):
        Quantiles((2.0, 1.0))
    with pytest.raises(ValueError, match="at least one"):
        Quantiles(())


def test_the_later_of_two_is_as_in_a_simulation() -> None:
    rng = random.Random(2)
    drawn = mean(max(10.0, rng.gauss(9.0, 2.0)) for _ in range(20_000))
    assert expected_later(10.0, 9.0, 2.0) == pytest.approx(drawn, rel=0.01)
    assert expected_later(10.0, 9.0, 0.0) == 10.0
