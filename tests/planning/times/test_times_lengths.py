"""Distributions as quantiles."""

from __future__ import annotations

import math
import random
from statistics import mean

import pytest
from pydantic import TypeAdapter, ValidationError

from hpcrl.planning.distributions import (
    Constant,
    Distribution,
    LogNormal,
    Pareto,
    Samples,
    Tail,
    UsualDistribution,
    drawer,
    quantiles_of,
)
from hpcrl.planning.lengths import Quantiles, expected_later


def test_a_log_normal_has_its_moments() -> None:
    distribution = quantiles_of(LogNormal(kind="lognormal", median=100.0, sigma=0.5))
    assert distribution.mean == pytest.approx(100 * math.exp(0.125), rel=5e-3)
    assert distribution.quantile(0.5) == pytest.approx(100.0, rel=5e-3)
    assert distribution.quantile(0.975) == pytest.approx(100 * math.exp(0.5 * 1.96), rel=0.02)
    assert distribution.above(100.0) == pytest.approx(0.5, abs=0.01)


def test_a_maximum_cuts() -> None:
    distribution = quantiles_of(LogNormal(kind="lognormal", median=100.0, sigma=1.0, maximum=150.0))
    assert distribution.values[-1] == 150.0
    assert distribution.mean < quantiles_of(LogNormal(kind="lognormal", median=100.0, sigma=1.0)).mean


@pytest.mark.parametrize("count", [1, 4, 64])
def test_the_largest_of_many_is_as_in_a_simulation(count: int) -> None:
    distribution = quantiles_of(LogNormal(kind="lognormal", median=10.0, sigma=0.6))
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


@pytest.mark.parametrize(
    "distribution",
    [
        Constant(kind="constant", value=3.0),
        LogNormal(kind="lognormal", median=10.0, sigma=0.8),
        LogNormal(kind="lognormal", median=10.0, sigma=1.0, maximum=40.0),
        Pareto(kind="pareto", minimum=2.0, alpha=3.0),
        Pareto(kind="pareto", minimum=2.0, alpha=1.5, maximum=20.0),
        Samples(kind="samples", values=(5.0, 1.0, 3.0)),
        Tail(kind="tail", median=4.0, tail_share=0.25, tail_factor=6.0),
    ],
    ids=lambda distribution: distribution.kind,
)
def test_what_is_planned_with_is_what_is_drawn(distribution: Distribution) -> None:
    draw = drawer(distribution, random.Random(3))
    drawn = sorted(draw() for _ in range(40_000))
    planned = quantiles_of(distribution)
    assert planned.mean == pytest.approx(mean(drawn), rel=0.03)
    for share in (0.1, 0.5, 0.9):
        assert planned.quantile(share) == pytest.approx(drawn[int(share * len(drawn))], rel=0.06)
    assert quantiles_of(distribution, limit=2.5).values[-1] <= 2.5


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({"median": 4.0}, "lognormal"),
        ({"median": 4.0, "sigma": 1.0, "maximum": 9.0}, "lognormal"),
        ({"values": [1.0, 2.0]}, "samples"),
        ({"kind": "pareto", "minimum": 1.0, "alpha": 2.0}, "pareto"),
    ],
)
def test_a_calibration_need_not_say_the_usual_kinds(given: dict[str, object], kind: str) -> None:
    assert TypeAdapter(UsualDistribution).validate_python(given).kind == kind


@pytest.mark.parametrize("given", [{}, {"sigma": 1.0}, {"median": 1.0, "values": [1.0]}])
def test_a_distribution_that_says_too_little_or_too_much_is_refused(given: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="either median or values"):
        TypeAdapter(UsualDistribution).validate_python(given)
