"""Random quantities: what a calibration or a durations file may say about one, its quantiles, and how it is drawn."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from statistics import NormalDist
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from hpcrl.config.base import Fraction, NonNegativeFloat, PositiveFloat, StrictModel
from hpcrl.config.environments import LatencyConfig
from hpcrl.planning.lengths import POINTS, Quantiles

Draw = Callable[[], float]


class Constant(StrictModel):
    """A distribution that always gives the same value."""

    kind: Literal["constant"]
    value: NonNegativeFloat
    """The value."""


class LogNormal(StrictModel):
    """Log-normal: the logarithm is normal."""

    kind: Literal["lognormal"]
    median: PositiveFloat
    """Half of the values are below."""
    sigma: NonNegativeFloat
    """Standard deviation of the natural logarithm; with 1, one value in 100 is above ten medians. 0 is a constant."""
    maximum: PositiveFloat | None = None
    """Larger values are cut to this."""

    def curve(self) -> Callable[[float], float]:
        """Return the function from ``z`` of the standard normal distribution to the value."""
        mu, sigma, top = math.log(self.median), self.sigma, math.inf if self.maximum is None else self.maximum
        return lambda z: min(top, math.exp(mu + sigma * z))


class Pareto(StrictModel):
    """Pareto: the share ``(minimum / x) ** alpha`` of the values is above x."""

    kind: Literal["pareto"]
    minimum: PositiveFloat
    """Smallest value."""
    alpha: Annotated[float, Field(gt=1, allow_inf_nan=False)]
    """Exponent of the tail; at 1 and below the mean does not exist."""
    maximum: PositiveFloat | None = None
    """Larger values are cut to this."""

    @model_validator(mode="after")
    def _ordered(self) -> Pareto:
        if self.maximum is not None and self.maximum < self.minimum:
            raise ValueError(f"maximum {self.maximum:g} is below minimum {self.minimum:g}")
        return self

    def curve(self) -> Callable[[float], float]:
        """Return the function from a share to the value that this share of the values exceeds."""
        minimum, power, top = self.minimum, -1.0 / self.alpha, math.inf if self.maximum is None else self.maximum
        return lambda share: min(top, minimum * share**power)


class Samples(StrictModel):
    """Measured values, each as likely as the others."""

    kind: Literal["samples"]
    values: Annotated[tuple[NonNegativeFloat, ...], Field(min_length=1, strict=False)]
    """The values."""


class Tail(StrictModel):
    """0.5 to 1.5 medians, and for some ``tail_factor`` times that: what ``environments.*.latency`` injects."""

    kind: Literal["tail"]
    median: NonNegativeFloat
    """Median outside of the tail."""
    tail_share: Fraction = 0.0
    """Share of values in the tail."""
    tail_factor: PositiveFloat = 10.0
    """Factor by which these are larger."""


Distribution = Annotated[Constant | LogNormal | Pareto | Samples | Tail, Field(discriminator="kind")]


def _with_kind(given: Any) -> Any:
    """Return the distribution with its kind: calibrations have ``median`` and ``sigma``, or ``values``, without it."""
    if not isinstance(given, dict) or "kind" in given:
        return given
    if ("median" in given) == ("values" in given):
        raise ValueError("needs either median or values, or a kind")
    return {"kind": "samples", **given} if "values" in given else {"kind": "lognormal", "sigma": 0.0, **given}


UsualDistribution = Annotated[Distribution, BeforeValidator(_with_kind)]
"""A `Distribution` whose kind is seen from what is given."""


def drawer(distribution: Distribution, rng: Random) -> Draw:
    """Return a function that draws one value at a call."""
    uniform = rng.random
    match distribution:
        case Constant(value=value):
            return lambda: value
        case LogNormal():
            normal, curve = rng.normalvariate, distribution.curve()
            return lambda: curve(normal(0.0, 1.0))
        case Pareto():
            above = distribution.curve()
            return lambda: above(1.0 - uniform())
        case Samples(values=values):
            count = len(values)
            return lambda: values[int(uniform() * count)]
        case Tail(median=median, tail_share=share, tail_factor=factor):
            return lambda: median * (0.5 + uniform()) * (factor if uniform() < share else 1.0)


def quantiles_of(distribution: Distribution, limit: float = math.inf) -> Quantiles:
    """Return the values that the planner integrates over; values above ``limit`` are cut to it."""
    points = [(2 * i + 1) / (2 * POINTS) for i in range(POINTS)]
    match distribution:
        case Constant(value=value):
            values = [value]
        case LogNormal(sigma=0.0, median=median, maximum=maximum):
            values = [median if maximum is None else min(median, maximum)]
        case LogNormal():
            curve, normal = distribution.curve(), NormalDist()
            values = [curve(normal.inv_cdf(point)) for point in points]
        case Pareto():
            above = distribution.curve()
            values = [above(1.0 - point) for point in points]
        case Samples(values=measured):
            values = list(measured)
        case Tail():
            values = _tail_values(distribution)
    return Quantiles.of([min(value, limit) for value in values])


def _tail_values(tail: Tail) -> list[float]:
    if not tail.median:
        return [0.0]
    usual = Quantiles.of([tail.median * (0.5 + (2 * i + 1) / 256) for i in range(128)])
    late = round(128 * tail.tail_share)
    ordinary = usual.sample(128 - late) if late < 128 else []
    return [*ordinary, *(value * tail.tail_factor for value in (usual.sample(late) if late else ()))]


def tail_of(latency: LatencyConfig) -> Tail:
    """Return the tail that ``environments.*.latency`` injects (`hpcrl.rollouts.environments.latency`)."""
    return Tail(kind="tail", median=latency.median_s, tail_share=latency.tail_share, tail_factor=latency.tail_factor)


def mean_of(distribution: Distribution) -> float:
    """Return the mean; for a cut log-normal distribution, the mean without the cut (an upper bound)."""
    match distribution:
        case Constant(value=value):
            return value
        case LogNormal(median=median, sigma=sigma, maximum=maximum):
            mean = median * math.exp(sigma**2 / 2)
            return mean if maximum is None else min(mean, maximum)
        case Pareto(minimum=minimum, alpha=alpha, maximum=maximum):
            if maximum is None:
                return minimum * alpha / (alpha - 1)
            cut: float = minimum**alpha * maximum ** (1 - alpha)
            return (alpha * minimum - cut) / (alpha - 1)
        case Samples(values=values):
            return sum(values) / len(values)
        case Tail(median=median, tail_share=share, tail_factor=factor):
            return median * (1.0 + share * (factor - 1.0))
