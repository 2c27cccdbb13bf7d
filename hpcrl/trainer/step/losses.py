"""Token-level policy losses for batches that older versions of the policy sampled.

Every loss takes flat tensors of the N trained tokens of a micro-batch and returns a sum; `policy_loss`
divides it by the sampled tokens of the *whole* batch, over all ranks and micro-batches, so that how a batch
is cut changes nothing. docs/algorithms.md has the formulas with their sources.

There is one optimizer step a batch, so the policy that is optimised is, in the forward pass, also the
"old policy" of PPO. ``ppo_clip``, ``cispo`` and ``gspo`` would then never clip; they take the engine's
log-probabilities as the old policy's instead (the "bypass" of verl and others).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hpcrl.config.algorithm import KlConfig, LossConfig
from hpcrl.modeling.exchange import sum_over
from hpcrl.modeling.sums import add_rows, count_rows

__all__ = ["MAX_LOG_RATIO", "PolicyLoss", "TrainedTokens", "policy_loss", "supervised_loss"]

MAX_LOG_RATIO = 20.0
"""A ratio is ``e^20`` at most, as in verl: float32 ends at ``e^88``, and one such token would be the whole step."""


class TrainedTokens(NamedTuple):
    """What a loss is computed from, for the N trained tokens of a micro-batch.

    Attributes
    ----------
    logprobs:
        ``[N]`` float32 with gradient: the trainer's log-probabilities.
    engine_logprobs:
        ``[N]`` float32: those of the policy version that sampled the tokens.
    advantages:
        ``[N]`` float32.
    sequences:
        ``[N]`` int64, non-negative: which rollout each token belongs to. A rollout is never cut in two
        micro-batches.
    rollouts:
        How many there are; the host knows it.
    peers:
        Ranks that have other tokens of these rollouts, the context-parallel ones: all of them compute a loss of the
        micro-batch, with or without trained tokens. None where all tokens are here.
    reference_logprobs:
        ``[N]`` float32: those of the reference, where the loss holds the policy near it.
    """

    logprobs: Tensor
    engine_logprobs: Tensor
    advantages: Tensor
    sequences: Tensor
    rollouts: int
    peers: dist.ProcessGroup | None = None
    reference_logprobs: Tensor | None = None


class PolicyLoss(NamedTuple):
    """A loss with what the metrics need of each token.

    Attributes
    ----------
    loss:
        Scalar with gradient.
    masked:
        ``[N]`` bool, detached: the loss masked the token or cut its ratio.
    log_ratio:
        ``[N]`` float32, detached: trainer minus engine log-probability.
    """

    loss: Tensor
    masked: Tensor
    log_ratio: Tensor


_Terms = tuple[Tensor, Tensor]
"""Per-token loss ``[N]`` with gradient, and masked flags ``[N]``."""


def _ratio(log_ratio: Tensor, cut: Tensor) -> Tensor:
    """``exp(log_ratio)`` whose gradient is finite everywhere; 1 without gradient where ``cut``.

    Where a token is to have no part in a loss, its ratio must be left out *before* the exponential: a zero that comes
    behind an overflow is a zero times infinity in the backward pass, which is NaN, and in all tokens after the sum.
    """
    return torch.where(cut, 0.0, log_ratio).clamp(max=MAX_LOG_RATIO).exp()


def _masked_ratio(tokens: TrainedTokens, log_ratio: Tensor, config: LossConfig) -> _Terms:
    """DPPO with the binary total-variation mask, and a squared log-ratio that also holds masked tokens.

    A token is masked where its probability has already moved too far in the direction in which its
    advantage would move it on.
    """
    moved = tokens.logprobs.detach().exp() - tokens.engine_logprobs.exp()
    too_high = (tokens.advantages > 0) & (moved > config.mask_high)
    too_low = (tokens.advantages < 0) & (moved < -config.mask_low)
    masked = too_high | too_low
    gain = torch.where(masked, 0.0, tokens.advantages * _ratio(log_ratio, masked))
    return config.kl_tau * log_ratio.square() - gain, masked | (log_ratio.detach() > MAX_LOG_RATIO)


def _on_policy_gain(tokens: TrainedTokens) -> Tensor:
    """``r A`` with ``r = 1`` in value and the gradient of the log-probability: PPO before its first step."""
    return (tokens.logprobs - tokens.logprobs.detach()).exp() * tokens.advantages


def _icepop(tokens: TrainedTokens, log_ratio: Tensor, config: LossConfig) -> _Terms:
    """Importance weight between engine and trainer, set to zero outside a band."""
    weight = log_ratio.detach().exp()
    masked = (weight < config.ratio_low) | (weight > config.ratio_high)
    return -torch.where(masked, 0.0, weight) * _on_policy_gain(tokens), masked


def _tis(tokens: TrainedTokens, log_ratio: Tensor, config: LossConfig) -> _Terms:
    """Importance weight between engine and trainer, truncated from above."""
    weight = log_ratio.detach().exp()
    return -weight.clamp(max=config.ratio_high) * _on_policy_gain(tokens), weight > config.ratio_high


def _clipped(log_ratio: Tensor, advantages: Tensor, config: LossConfig) -> _Terms:
    """``-min(r A, clip(r) A)``. Clipped tokens have no gradient; at the edge itself a token still has."""
    low, high = 1.0 - config.clip_low, 1.0 + config.clip_high
    value = log_ratio.detach().exp()
    masked = ((advantages > 0) & (value > high)) | ((advantages < 0) & (value < low))
    kept = torch.where(masked, value.clamp(low, high), _ratio(log_ratio, masked))
    return -kept * advantages, masked | (log_ratio.detach() > MAX_LOG_RATIO)


def _ppo_clip(tokens: TrainedTokens, log_ratio: Tensor, config: LossConfig) -> _Terms:
    """PPO's clipped objective with the engine as the old policy; ``clip_high > clip_low`` is DAPO's."""
    return _clipped(log_ratio, tokens.advantages, config)


def _cispo(tokens: TrainedTokens, log_ratio: Tensor, config: LossConfig) -> _Terms:
    """Policy gradient weighted by a clipped ratio: no token loses its gradient."""
    low, high = 1.0 - config.clip_low, 1.0 + config.clip_high
    weight = log_ratio.detach().exp()
    cut = (weight < low) | (weight > high)
    return -weight.clamp(low, high) * tokens.advantages * tokens.logprobs, cut


def _gspo(tokens: TrainedTokens, log_ratio: Tensor, config: LossConfig) -> _Terms:
    """PPO's clipped objective on the geometric mean of a rollout's ratios, which all its tokens share."""
    count = count_rows(tokens.sequences, tokens.rollouts)
    sums = add_rows(log_ratio.new_zeros(tokens.rollouts), tokens.sequences, log_ratio)
    if tokens.peers is not None:
        sums = sum_over(sums, tokens.peers)
        dist.all_reduce(count, group=tokens.peers)
    mean = sums / count.clamp(min=1)
    return _clipped(mean[tokens.sequences], tokens.advantages, config)


_LOSSES: dict[str, Callable[[TrainedTokens, Tensor, LossConfig], _Terms]] = {
    "masked_ratio": _masked_ratio,
    "icepop": _icepop,
    "tis": _tis,
    "ppo_clip": _ppo_clip,
    "cispo": _cispo,
    "gspo": _gspo,
}


def _divergence(tokens: TrainedTokens, log_ratio: Tensor, config: KlConfig) -> Tensor:
    """Estimate the divergence from policy to reference of each token: ``q - 1 - log q``, q reference over policy.

    Its mean over tokens of the policy is the divergence, its gradient is not; with the ratio of trainer to engine as a
    factor both are (DeepSeek-V3.2, arXiv 2512.02556, section 3.1).
    """
    assert tokens.reference_logprobs is not None
    away = (tokens.reference_logprobs - tokens.logprobs).clamp(max=MAX_LOG_RATIO)
    found = away.exp() - 1.0 - away
    if config.estimator == "k3":
        return found
    return found * _ratio(log_ratio, log_ratio.detach() > MAX_LOG_RATIO)


def _held_advantages(tokens: TrainedTokens, config: KlConfig) -> Tensor:
    """Take each token's log-ratio of policy to reference from its advantage, without what it does to later tokens.

    On policy the gradient of a loss with these is that of the divergence from policy to reference at each token.
    """
    assert tokens.reference_logprobs is not None
    away = (tokens.logprobs.detach() - tokens.reference_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return tokens.advantages - config.coefficient * away


def policy_loss(
    tokens: TrainedTokens, config: LossConfig, *, total_tokens: int, kl: KlConfig | None = None
) -> PolicyLoss:
    """The loss of one micro-batch, as its share of the batch's token mean.

    Parameters
    ----------
    tokens:
        The trained tokens; N may be 0, which gives 0 (still connected to ``logprobs`` for autograd).
    config:
        Which loss, and its limits.
    total_tokens:
        Trained tokens of the whole batch, over all ranks and micro-batches: the losses of all
        micro-batches add up to the token mean.
    kl:
        The penalty on the distance from the reference, with ``tokens.reference_logprobs``.

    Raises
    ------
    ValueError
        ``total_tokens`` is not positive.
    """
    if total_tokens <= 0:
        raise ValueError(f"total_tokens must be positive, it is {total_tokens}")
    log_ratio = tokens.logprobs - tokens.engine_logprobs
    if kl is not None and kl.applied_to == "reward":
        tokens = tokens._replace(advantages=_held_advantages(tokens, kl))
    terms, masked = _LOSSES[config.kind](tokens, log_ratio, config)
    if kl is not None and kl.applied_to == "loss":
        terms = terms + kl.coefficient * _divergence(tokens, log_ratio, kl)
    return PolicyLoss(terms.sum() / total_tokens, masked, log_ratio.detach())


def supervised_loss(logprobs: Tensor, *, total_tokens: int) -> PolicyLoss:
    """Return the cross entropy of one micro-batch of conversations, as its share of the batch's token mean.

    Parameters
    ----------
    logprobs:
        ``[N]`` float32 with gradient: the trainer's log-probabilities of the trained tokens; N may be 0.
    total_tokens:
        Trained tokens of the whole batch, over all ranks and micro-batches.

    Raises
    ------
    ValueError
        ``total_tokens`` is not positive.
    """
    if total_tokens <= 0:
        raise ValueError(f"total_tokens must be positive, it is {total_tokens}")
    # no engine has sampled these tokens: there is no other distribution to compare with
    unchanged = torch.zeros_like(logprobs, dtype=torch.float32, requires_grad=False)
    return PolicyLoss(-logprobs.sum() / total_tokens, unchanged.bool(), unchanged)
