"""The interface of token-level losses: all of hpcrl go through it, and so do those of other packages.

docs/extending.md has a worked example.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from hpcrl.config.algorithm import LossNeed

MAX_LOG_RATIO = 20.0
"""Maximum log-ratio, as in verl: float32 ends at ``e^88``, and one such token would dominate the step."""


class TrainedTokens(NamedTuple):
    """Inputs of a loss, for the N trained tokens of a micro-batch.

    Attributes
    ----------
    logprobs:
        ``[N]`` float32 with gradient: the trainer's log-probabilities.
    engine_logprobs:
        ``[N]`` float32: those of the policy version that sampled the tokens.
    advantages:
        ``[N]`` float32.
    sequences:
        ``[N]`` int64, non-negative: the sequence of each token. A rollout has one sequence, or one for each of its
        branches; a sequence is never split between two micro-batches.
    num_sequences:
        Number of sequences, as a host integer.
    peers:
        Context-parallel ranks that have other tokens of these sequences: all of them compute a loss of the
        micro-batch, with or without trained tokens. None if all tokens are on this rank.
    reference_logprobs:
        ``[N]`` float32: those of the reference, where the recipe has ``algorithm.kl``; None otherwise.
    teacher_logprobs:
        ``[N]`` float32: those of the teacher, NaN where it did not score the rollout; None for a loss that does not
        need it.
    """

    logprobs: Tensor
    engine_logprobs: Tensor
    advantages: Tensor
    sequences: Tensor
    num_sequences: int
    peers: dist.ProcessGroup | None = None
    reference_logprobs: Tensor | None = None
    teacher_logprobs: Tensor | None = None


class LossTerms(NamedTuple):
    """Output of a loss, token by token.

    Attributes
    ----------
    loss:
        ``[N]`` with gradient. The trainer adds them up, and divides by the trained tokens of the whole batch.
    masked:
        ``[N]`` bool: the loss masked the token or cut its ratio.
    metrics:
        ``[N]`` each, by the names in `TokenLoss.metrics`. The record of the step has the mean of each over all tokens
        of the batch at which it is finite, as ``loss_metrics``.
    """

    loss: Tensor
    masked: Tensor
    metrics: Mapping[str, Tensor] = {}


class NoParameters(BaseModel):
    """Parameters of a loss that has none."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class TokenLoss(ABC):
    """A loss of trained tokens.

    An instance lives as long as the trainer and has no state: the loss of a batch may be computed in any number of
    parts, on several ranks, and a second time after a restart.

    Attributes
    ----------
    Parameters:
        The model of its parameters, which checks what the recipe says.
    needs:
        Requirements on the trainer in addition to tokens; the recipe repeats it in ``algorithm.loss.needs``.
    metrics:
        Names of what it measures, of lower-case letters, digits and ``_``.
    """

    Parameters: ClassVar[type[BaseModel]] = NoParameters
    needs: ClassVar[frozenset[LossNeed]] = frozenset()
    metrics: ClassVar[tuple[str, ...]] = ()

    def __init__(self, parameters: Any) -> None:
        """Keep the parameters, an instance of ``Parameters``."""
        self.parameters = parameters

    @abstractmethod
    def terms(self, tokens: TrainedTokens, log_ratio: Tensor) -> LossTerms:
        """Return the loss of each token.

        Parameters
        ----------
        tokens:
            N may be 0. Without ``whole_sequences`` in `needs` these may be any part of the tokens of a micro-batch.
        log_ratio:
            ``[N]`` float32 with gradient: log-probability of the trainer minus that of the engine.
        """


def bounded_ratio(log_ratio: Tensor, cut: Tensor) -> Tensor:
    """Return ``exp(log_ratio)`` whose gradient is finite everywhere; 1 without gradient where ``cut``.

    If a token must have no part in a loss, its ratio must be left out *before* the exponential: a zero that comes
    behind an overflow is a zero times infinity in the backward pass, which is NaN, and in all tokens after the sum.
    """
    return torch.where(cut, 0.0, log_ratio).clamp(max=MAX_LOG_RATIO).exp()
