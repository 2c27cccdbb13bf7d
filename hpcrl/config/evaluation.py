"""Sets of held-out prompts that a recipe evaluates by themselves."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from hpcrl.config.base import MOST, Name, NonNegativeInt, PositiveInt, StrictModel
from hpcrl.config.sampling import EvaluationSampling, SetSampling


class EvaluationSetConfig(StrictModel):
    """Held-out prompts that are evaluated by themselves, in addition to those of ``evaluation``."""

    name: Name
    """Name in events and screens; unique among the sets."""
    environments: Annotated[tuple[Name, ...] | None, Field(min_length=1, strict=False)] = None
    """Names of environments of the recipe, whose held-out prompts it has, by weight; as many of each where one of them
    has weight 0. None: all that are trained on."""
    every_steps: NonNegativeInt | None = None
    """Policy versions between its evaluations; 0: only the first and the last version. None:
    ``evaluation.every_steps``."""
    prompts: PositiveInt = 64
    """Its held-out prompts, over all of its environments; the same ones each time."""
    samples: PositiveInt = 1
    """Samples of each prompt, k: pass@1 to pass@k are estimated from them, and the reward is the mean of all."""
    sampling: SetSampling = SetSampling()
    """Sampling of tokens; more than one sample of a prompt needs a temperature."""
    pass_reward: Annotated[float, Field(ge=-MOST, le=MOST, allow_inf_nan=False)] = 1.0
    """A sample passes whose reward is at least this."""

    @model_validator(mode="before")
    @classmethod
    def _of_earlier_recipes(cls, given: Any) -> Any:
        # earlier recipes and runs have `temperature` next to `sampling`
        if not isinstance(given, dict) or "temperature" not in given:
            return given
        rest = {key: value for key, value in given.items() if key != "temperature"}
        if "sampling" in rest:
            what = "temperature is a key of sampling: write sampling: {temperature: ...}"
            raise PydanticCustomError("two_temperatures", what)
        return {**rest, "sampling": {"temperature": given["temperature"]}}

    def sampled(self, evaluation: EvaluationSampling) -> EvaluationSampling:
        """Return how tokens of the set are drawn, with those of ``evaluation.sampling`` where it says nothing."""
        return self.sampling.beside(evaluation)
