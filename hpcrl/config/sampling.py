"""Sampling of tokens, in training and in held-out evaluation."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from hpcrl.config.base import Fraction, NonNegativeInt, PositiveInt, StrictModel

LEAST_TEMPERATURE = 0.01
"""Minimum temperature. Below it engines divide by another value: vLLM takes 0.01 instead, and from 1e-5 on the
largest logit. Above 2 engines refuse a request."""


def _greedy_or_sampled(temperature: float) -> float:
    if 0.0 < temperature < LEAST_TEMPERATURE:
        raise PydanticCustomError("temperature", f"must be 0 (greedy), or at least {LEAST_TEMPERATURE:g}")
    return temperature


_Temperature = Annotated[float, Field(ge=0, le=2), AfterValidator(_greedy_or_sampled)]
_StopStrings = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False)]
_StopTokens = Annotated[tuple[NonNegativeInt, ...], Field(strict=False)]


class _Drawing(StrictModel):
    """Settings that training and evaluation have in common."""

    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The smallest set of the most likely tokens is kept that has this share of the probability together. 1: all are
    kept."""
    top_k: NonNegativeInt = 0
    """Number of the most likely tokens that are kept. 0: all are."""
    min_p: Fraction = 0.0
    """Tokens are kept that have at least this share of the probability of the most likely one. 0: all are."""
    seed: NonNegativeInt | None = None
    """Other numbers give other draws for the same prompts. Each turn of each rollout has a seed of its own, into which
    this number enters: rollouts of one prompt differ, and a turn that is sampled again begins with the same draws.
    None: nothing more enters."""


class SamplingConfig(_Drawing):
    """Sampling of tokens in training rollouts. ``top_p``, ``top_k`` and ``min_p`` have to keep all tokens there: the
    trainer computes probabilities over the whole vocabulary (docs/algorithms.md, Sampling).
    """

    temperature: Annotated[float, Field(ge=LEAST_TEMPERATURE, le=2)] = 1.0
    """Divides logits; log-probabilities are taken after it on both sides."""
    max_new_tokens: PositiveInt = 32
    """Maximum tokens that the model samples in one turn."""
    stop: _StopStrings = ()
    """Texts that end a turn. The tokens are trained on up to the one that completes such a text, and the environment
    gets the text before it. The template's end of a turn follows in the next prompt; it is not trained on."""
    stop_token_ids: _StopTokens = ()
    """Tokens that end a turn in addition to those of the model. They are trained on, and environments do not get
    them."""


class EvaluationSampling(_Drawing):
    """Sampling of tokens in held-out rollouts; nothing is trained on them."""

    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    """Divides logits; 0, or at least 0.01. 0: the most likely token is taken."""
    max_new_tokens: PositiveInt | None = None
    """Maximum tokens that the model samples in one turn. None: as in training."""
    stop: _StopStrings | None = None
    """Texts that end a turn. None: as in training."""
    stop_token_ids: _StopTokens | None = None
    """Further tokens that end a turn. None: as in training."""

    def beside(self, training: SamplingConfig) -> SamplingConfig:
        """Return all values of held-out rollouts: those of training in place of those that are None."""
        own = {name: value for name in type(self).model_fields if (value := getattr(self, name)) is not None}
        return training.model_copy(update={"seed": None, **own})


class SetSampling(StrictModel):
    """Sampling of tokens in the rollouts of one set of held-out prompts; nothing is trained on them. A value of None
    means the value of ``evaluation.sampling``.
    """

    temperature: _Temperature | None = None
    """Divides logits; 0, or at least 0.01. 0: the most likely token is taken. None: as in ``evaluation.sampling``."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """The smallest set of the most likely tokens is kept that has this share of the probability together. None: as in
    ``evaluation.sampling``."""
    top_k: NonNegativeInt | None = None
    """Number of the most likely tokens that are kept; 0: all are. None: as in ``evaluation.sampling``."""
    min_p: Fraction | None = None
    """Tokens are kept that have at least this share of the probability of the most likely one; 0: all are. None: as in
    ``evaluation.sampling``."""
    seed: NonNegativeInt | None = None
    """Other numbers give other draws for the same prompts. None: as in ``evaluation.sampling``."""
    max_new_tokens: PositiveInt | None = None
    """Maximum tokens that the model samples in one turn. None: as in ``evaluation.sampling``."""
    stop: _StopStrings | None = None
    """Texts that end a turn. None: as in ``evaluation.sampling``."""
    stop_token_ids: _StopTokens | None = None
    """Further tokens that end a turn. None: as in ``evaluation.sampling``."""

    def beside(self, evaluation: EvaluationSampling) -> EvaluationSampling:
        """Return all values of the set: those of ``evaluation.sampling`` in place of those that are None."""
        own = {name: value for name in type(self).model_fields if (value := getattr(self, name)) is not None}
        return evaluation.model_copy(update=own)
