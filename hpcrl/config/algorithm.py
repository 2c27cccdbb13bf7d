"""How advantages and the loss are computed."""

from __future__ import annotations

from typing import Literal

from hpcrl.config.base import NonNegativeFloat, PositiveFloat, PositiveInt, StrictModel
from hpcrl.config.distillation import DistillationConfig

__all__ = ["AlgorithmConfig", "KlConfig", "LossConfig"]


class LossConfig(StrictModel):
    """The token-level policy loss; formulas and sources in docs/algorithms.md."""

    kind: Literal["masked_ratio", "icepop", "tis", "ppo_clip", "cispo", "gspo"] = "masked_ratio"
    """``masked_ratio`` (importance ratio, tokens masked by probability difference; what the reference run uses),
    ``icepop`` (double-sided mask on the ratio), ``tis`` (truncated ratio), ``ppo_clip``, ``cispo``, ``gspo``."""
    mask_low: PositiveFloat = 0.2
    """``masked_ratio``: largest fall of a sampled token's probability (engine to trainer) that still counts."""
    mask_high: PositiveFloat = 0.2
    """``masked_ratio``: largest rise of a sampled token's probability that still counts."""
    kl_tau: NonNegativeFloat = 1e-3
    """``masked_ratio``: weight of the squared log-ratio that keeps trainer and engine close."""
    ratio_low: PositiveFloat = 0.5
    """``icepop``: smallest importance ratio that counts."""
    ratio_high: PositiveFloat = 5.0
    """``icepop``: largest ratio that counts; ``tis``: where it is cut."""
    clip_low: PositiveFloat = 0.2
    """``ppo_clip``, ``cispo``, ``gspo``: lower clip distance from 1."""
    clip_high: PositiveFloat = 0.28
    """``ppo_clip``, ``cispo``, ``gspo``: upper clip distance from 1."""

    @property
    def is_of_rollouts(self) -> bool:
        """Whether a token's loss depends on all tokens of its rollout, also on those that other ranks have."""
        return self.kind == "gspo"


class KlConfig(StrictModel):
    """A penalty on the distance of the policy from a reference, on each trained token.

    The reference, the start model or a later version of the policy, is computed beside the policy in each micro-batch,
    from a frozen copy in ``trainer.dtype``; with ``trainer.lora`` it is the policy without its adapters, which takes no
    memory.
    """

    coefficient: PositiveFloat
    """Weight of the penalty."""
    estimator: Literal["weighted_k3", "k3"] = "weighted_k3"
    """Of the divergence from the policy to the reference, with ``applied_to: loss``. ``weighted_k3`` has the importance
    ratio of trainer to engine as a factor, so that its gradient is that of the divergence (DeepSeek-V3.2, arXiv
    2512.02556, section 3.1); ``k3`` is that of GRPO (arXiv 2402.03300), without the factor."""
    applied_to: Literal["loss", "reward"] = "loss"
    """``loss``: the estimate is added to the loss of a token. ``reward``: the log-ratio of policy to reference is taken
    from the token's advantage."""
    reference_every_steps: PositiveInt | None = None
    """The reference becomes the policy after every so many steps; it is in checkpoints then. None: it stays the start
    model."""
    on_host: bool = False
    """The copy is in host memory, and comes to the device to be computed; always so with
    ``trainer.memory.parameter_offload``."""


class AlgorithmConfig(StrictModel):
    """How advantages and the loss are computed."""

    advantage: Literal["grpo", "mean_baseline"] = "grpo"
    """``grpo``: reward minus group mean, divided by the group's standard deviation; ``mean_baseline``: not divided."""
    loss: LossConfig = LossConfig()
    """The policy loss."""
    kl: KlConfig | None = None
    """Penalty on the distance from a reference, such as the start model; none where it is left out."""
    distillation: DistillationConfig | None = None
    """A teacher that the policy learns from, token by token; none where it is left out."""
