"""Token-level policy losses for batches that older versions of the policy sampled.

Every loss takes flat tensors of the N trained tokens of a micro-batch and returns a sum; `policy_loss`
divides it by the sampled tokens of the *whole* batch, over all ranks and micro-batches, so that how a batch
is cut changes nothing. docs/algorithms.md has the formulas with their sources.

There is one optimizer step a batch, so the policy that is optimised is, in the forward pass, also the
"old policy" of PPO. ``ppo_clip``, ``cispo`` and ``gspo`` would then never clip; they take the engine's
log-probabilities as the old policy's instead (the "bypass" of verl and others).
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hpcrl.config.algorithm import (
    CispoLossConfig,
    CustomLossConfig,
    GspoLossConfig,
    IcepopLossConfig,
    KlConfig,
    LossConfig,
    MaskedRatioLossConfig,
    PpoClipLossConfig,
    TisLossConfig,
)
from hpcrl.extend import ExtensionError, call_extension, extension_path, import_object
from hpcrl.modeling.parallel.collectives import sum_over
from hpcrl.modeling.sums import add_rows, count_rows
from hpcrl.trainer.token_loss import MAX_LOG_RATIO, LossTerms, TokenLoss, TrainedTokens, bounded_ratio

__all__ = ["MAX_LOG_RATIO", "PolicyLoss", "TrainedTokens", "make_loss", "policy_loss", "supervised_loss"]


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
    metrics:
        ``[M, N]`` float32, detached: what the loss measures of each token, in the order of its declaration; None where
        it measures nothing.
    """

    loss: Tensor
    masked: Tensor
    log_ratio: Tensor
    metrics: Tensor | None = None


class _MaskedRatio(TokenLoss):
    """DPPO with the binary total-variation mask, and a squared log-ratio that also holds masked tokens.

    A token is masked where its probability has already moved too far in the direction in which its
    advantage would move it on.
    """

    parameters: MaskedRatioLossConfig

    def terms(self, tokens: TrainedTokens, log_ratio: Tensor) -> LossTerms:
        moved = tokens.logprobs.detach().exp() - tokens.engine_logprobs.exp()
        too_high = (tokens.advantages > 0) & (moved > self.parameters.mask_high)
        too_low = (tokens.advantages < 0) & (moved < -self.parameters.mask_low)
        masked = too_high | too_low
        gain = torch.where(masked, 0.0, tokens.advantages * bounded_ratio(log_ratio, masked))
        terms = self.parameters.kl_tau * log_ratio.square() - gain
        return LossTerms(terms, masked | (log_ratio.detach() > MAX_LOG_RATIO))


def _on_policy_gain(tokens: TrainedTokens) -> Tensor:
    """Return ``r A`` with value ``r = 1`` and the gradient of the log-probability: PPO before its first step."""
    return (tokens.logprobs - tokens.logprobs.detach()).exp() * tokens.advantages


class _Icepop(TokenLoss):
    """Importance weight between engine and trainer, set to zero outside a band."""

    parameters: IcepopLossConfig

    def terms(self, tokens: TrainedTokens, log_ratio: Tensor) -> LossTerms:
        weight = log_ratio.detach().exp()
        masked = (weight < self.parameters.ratio_low) | (weight > self.parameters.ratio_high)
        return LossTerms(-torch.where(masked, 0.0, weight) * _on_policy_gain(tokens), masked)


class _Tis(TokenLoss):
    """Importance weight between engine and trainer, truncated from above."""

    parameters: TisLossConfig

    def terms(self, tokens: TrainedTokens, log_ratio: Tensor) -> LossTerms:
        weight, most = log_ratio.detach().exp(), self.parameters.ratio_high
        return LossTerms(-weight.clamp(max=most) * _on_policy_gain(tokens), weight > most)


_ClipConfig = PpoClipLossConfig | CispoLossConfig | GspoLossConfig


def _clipped(log_ratio: Tensor, advantages: Tensor, config: _ClipConfig) -> LossTerms:
    """Return ``-min(r A, clip(r) A)``. Clipped tokens have no gradient; a token exactly at the bound still has."""
    low, high = 1.0 - config.clip_low, 1.0 + config.clip_high
    value = log_ratio.detach().exp()
    masked = ((advantages > 0) & (value > high)) | ((advantages < 0) & (value < low))
    kept = torch.where(masked, value.clamp(low, high), bounded_ratio(log_ratio, masked))
    return LossTerms(-kept * advantages, masked | (log_ratio.detach() > MAX_LOG_RATIO))


class _PpoClip(TokenLoss):
    """PPO's clipped objective with the engine as the old policy; ``clip_high > clip_low`` is DAPO's."""

    parameters: PpoClipLossConfig

    def terms(self, tokens: TrainedTokens, log_ratio: Tensor) -> LossTerms:
        return _clipped(log_ratio, tokens.advantages, self.parameters)


class _Cispo(TokenLoss):
    """Policy gradient weighted by a clipped ratio: no token loses its gradient."""

    parameters: CispoLossConfig

    def terms(self, tokens: TrainedTokens, log_ratio: Tensor) -> LossTerms:
        low, high = 1.0 - self.parameters.clip_low, 1.0 + self.parameters.clip_high
        weight = log_ratio.detach().exp()
        cut = (weight < low) | (weight > high)
        return LossTerms(-weight.clamp(low, high) * tokens.advantages * tokens.logprobs, cut)


class _Gspo(TokenLoss):
    """PPO's clipped objective on the geometric mean of a sequence's ratios, which all its trained tokens share.

    In a branch these are the tokens behind its shared prefix: the prefix is the prompt that they were sampled with, and
    what was sampled in it is trained in the earlier sequence.
    """

    needs = frozenset({"whole_sequences"})
    parameters: GspoLossConfig

    def terms(self, tokens: TrainedTokens, log_ratio: Tensor) -> LossTerms:
        count = count_rows(tokens.sequences, tokens.num_sequences)
        sums = add_rows(log_ratio.new_zeros(tokens.num_sequences), tokens.sequences, log_ratio)
        if tokens.peers is not None:
            sums = sum_over(sums, tokens.peers)
            dist.all_reduce(count, group=tokens.peers)
        mean = sums / count.clamp(min=1)
        return _clipped(mean[tokens.sequences], tokens.advantages, self.parameters)


_LOSSES: dict[str, type[TokenLoss]] = {
    "masked_ratio": _MaskedRatio,
    "icepop": _Icepop,
    "tis": _Tis,
    "ppo_clip": _PpoClip,
    "cispo": _Cispo,
    "gspo": _Gspo,
}
_METRIC_NAME = re.compile(r"[a-z][a-z0-9_]*")


def make_loss(config: LossConfig) -> TokenLoss:
    """Make the loss of a recipe; one of the user's own is imported.

    Raises
    ------
    ExtensionError
        It cannot be imported, is not a `TokenLoss`, refuses its parameters, or needs something else than the recipe
        says.
    """
    if not isinstance(config, CustomLossConfig):
        return _LOSSES[config.kind](config)
    path = extension_path("loss", config.loss)
    found = import_object(path, called="class")
    if not (isinstance(found, type) and issubclass(found, TokenLoss)):
        raise ExtensionError(f"{path} is not a loss", "derive it from hpcrl.trainer.token_loss.TokenLoss")
    if wrong := [name for name in found.metrics if not _METRIC_NAME.fullmatch(name)]:
        hint = "write lower-case letters, digits and _"
        raise ExtensionError(f"{path} has a metric that is called {wrong[0]!r}", hint)
    if set(found.needs) != config.needed:
        needs = ", ".join(sorted(found.needs))
        hint = f"set algorithm.loss.needs: [{needs}]"
        raise ExtensionError(f"{path} declares needs [{needs}], and the recipe others", hint)
    hint = "correct algorithm.loss.parameters"
    parameters = call_extension(f"{path}.Parameters", lambda: found.Parameters.model_validate(config.parameters), hint)
    made: TokenLoss = call_extension(path, lambda: found(parameters), hint)
    return made


def _checked_terms(loss: TokenLoss, terms: Any, logprobs: Tensor) -> LossTerms:
    """Check what a loss returned, without waiting for the device.

    Raises
    ------
    ExtensionError
        It is not a `LossTerms`, or has another shape or other metrics than declared.
    """
    name = f"{type(loss).__module__}:{type(loss).__qualname__}"
    if not isinstance(terms, LossTerms):
        raise ExtensionError(f"{name}.terms returned a {type(terms).__name__}", "return LossTerms")
    if set(terms.metrics) != set(loss.metrics):
        raise ExtensionError(
            f"{name}.terms returned the metrics {sorted(terms.metrics)}", f"return those declared: {list(loss.metrics)}"
        )
    for part, value in {"loss": terms.loss, "masked": terms.masked, **terms.metrics}.items():
        if not isinstance(value, Tensor) or value.shape != logprobs.shape:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ExtensionError(f"{name}.terms returned {part} {shape} for {len(logprobs)} tokens", "return [N]")
    return terms


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
    return found * bounded_ratio(log_ratio, log_ratio.detach() > MAX_LOG_RATIO)


def _held_advantages(tokens: TrainedTokens, config: KlConfig) -> Tensor:
    """Take each token's log-ratio of policy to reference from its advantage, without what it does to later tokens.

    On policy the gradient of a loss with these is that of the divergence from policy to reference at each token.
    """
    assert tokens.reference_logprobs is not None
    away = (tokens.logprobs.detach() - tokens.reference_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return tokens.advantages - config.coefficient * away


def policy_loss(tokens: TrainedTokens, loss: TokenLoss, *, total_tokens: int, kl: KlConfig | None = None) -> PolicyLoss:
    """Return the loss of one micro-batch, as its share of the batch's token mean.

    Parameters
    ----------
    tokens:
        The trained tokens; N may be 0, which gives 0 (still connected to ``logprobs`` for autograd).
    loss:
        As `make_loss` makes it.
    total_tokens:
        Trained tokens of the whole batch, over all ranks and micro-batches: the losses of all micro-batches add up to
        the token mean.
    kl:
        Penalty on the distance from the reference, with ``tokens.reference_logprobs``.

    Raises
    ------
    ValueError
        ``total_tokens`` is not positive.
    ExtensionError
        A custom loss returned something else than one term for each token.
    """
    if total_tokens <= 0:
        raise ValueError(f"total_tokens must be positive, it is {total_tokens}")
    log_ratio = tokens.logprobs - tokens.engine_logprobs
    if kl is not None and kl.applied_to == "reward":
        tokens = tokens._replace(advantages=_held_advantages(tokens, kl))
    found = _checked_terms(loss, loss.terms(tokens, log_ratio), tokens.logprobs)
    terms = found.loss
    if kl is not None and kl.applied_to == "loss" and kl.coefficient > 0:
        terms = terms + kl.coefficient * _divergence(tokens, log_ratio, kl)
    measured = None
    if loss.metrics:
        measured = torch.stack([found.metrics[name].detach().float() for name in loss.metrics])
    return PolicyLoss(terms.sum() / total_tokens, found.masked, log_ratio.detach(), measured)


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
    # no engine sampled these tokens, so a distribution to compare with does not exist
    unchanged = torch.zeros_like(logprobs, dtype=torch.float32, requires_grad=False)
    return PolicyLoss(-logprobs.sum() / total_tokens, unchanged.bool(), unchanged)
