"""Sets of held-out prompts that a recipe evaluates by themselves."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from hpcrl.config.base import MOST, Name, NonNegativeInt, PositiveInt, StrictModel

__all__ = ["EvaluationSetConfig", "EvaluationTemperature"]

_LOWEST = 0.01


def _greedy_or_sampled(temperature: float) -> float:
    if 0.0 < temperature < _LOWEST:
        raise PydanticCustomError("temperature", f"must be 0 (greedy), or at least {_LOWEST}")
    return temperature


EvaluationTemperature = Annotated[float, Field(ge=0, le=MOST, allow_inf_nan=False), AfterValidator(_greedy_or_sampled)]
"""0 takes the most likely token; from 0.01 on it divides logits."""


class EvaluationSetConfig(StrictModel):
    """Held-out prompts that are evaluated by themselves, beside those of ``evaluation``."""

    name: Name
    """Name in events and screens; unique among the sets."""
    environments: Annotated[tuple[Name, ...] | None, Field(min_length=1, strict=False)] = None
    """Names of environments of the recipe, whose held-out prompts it has. None: all of them, by weight."""
    every_steps: NonNegativeInt | None = None
    """Policy versions between its evaluations; 0: only the first and the last version. None:
    ``evaluation.every_steps``."""
    prompts: PositiveInt = 64
    """Its held-out prompts, over all of its environments; the same ones each time."""
    samples: PositiveInt = 1
    """Samples of each prompt, k: pass@1 to pass@k are estimated from them, and the reward is the mean of all."""
    temperature: EvaluationTemperature = 0.0
    """0 is greedy; more than one sample of a prompt needs a temperature."""
    pass_reward: Annotated[float, Field(ge=-MOST, le=MOST, allow_inf_nan=False)] = 1.0
    """A sample passes whose reward is at least this."""
