"""Random quantities of a simulation: what a durations file may say about one, and how it is drawn."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Annotated, Literal

from pydantic import Field, model_validator

from hpcrl.config.base import Fraction, NonNegativeFloat, PositiveFloat, StrictModel

__all__ = ["Constant", "Distribution", "Draw", "LogNormal", "Pareto", "Samples", "Tail", "drawer", "mean_of"]

Draw = Callable[[], float]


class Constant(StrictModel):
    """Always the same."""

    kind: Literal["constant"]
    value: NonNegativeFloat
    """The value."""


class LogNormal(StrictModel):
    """Log-normal: the logarithm is normal."""

    kind: Literal["lognormal"]
    median: PositiveFloat
    """Half of the values are below."""
    sigma: NonNegativeFloat
    """Standard deviation of the natural logarithm; with 1, one value in 100 is above ten medians."""
    maximum: PositiveFloat | None = None
    """Larger values are cut to this."""


class Pareto(StrictModel):
    """Pareto: the share ``(minimum / x) ** alpha`` of the values is above x."""

    kind: Literal["pareto"]
    minimum: PositiveFloat
    """Smallest value."""
    alpha: Annotated[float, Field(gt=1, allow_inf_nan=False)]
    """Exponent of the tail; at 1 and below there is no mean."""
    maximum: PositiveFloat | None = None
    """Larger values are cut to this."""

    @model_validator(mode="after")
    def _ordered(self) -> Pareto:
        if self.maximum is not None and self.maximum < self.minimum:
            raise ValueError(f"maximum {self.maximum:g} is below minimum {self.minimum:g}")
        return self


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
    """How many times larger these are."""


Distribution = Annotated[Constant | LogNormal | Pareto | Samples | Tail, Field(discriminator="kind")]


def drawer(distribution: Distribution, rng: Random) -> Draw:
    """A function that draws one value at a call."""
    uniform = rng.random
    match distribution:
        case Constant(value=value):
            return lambda: value
        case LogNormal(median=median, sigma=sigma, maximum=maximum):
            mu, top = math.log(median), math.inf if maximum is None else maximum
            normal = rng.normalvariate
            return lambda: min(top, math.exp(normal(mu, sigma)))
        case Pareto(minimum=minimum, alpha=alpha, maximum=maximum):
            power, top = -1.0 / alpha, math.inf if maximum is None else maximum
            return lambda: min(top, minimum * (1.0 - uniform()) ** power)
        case Samples(values=values):
            count = len(values)
            return lambda: values[int(uniform() * count)]
        case Tail(median=median, tail_share=share, tail_factor=factor):
            return lambda: median * (0.5 + uniform()) * (factor if uniform() < share else 1.0)


def mean_of(distribution: Distribution) -> float:
    """The mean; of a cut log-normal, that without the cut (an upper bound)."""
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
