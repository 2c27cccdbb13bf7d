"""Advantages and the loss: the section ``algorithm`` of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from hpcrl.config.base import ExtensionName, NonNegativeFloat, PositiveFloat, PositiveInt, StrictModel
from hpcrl.config.distillation import DistillationConfig

LossNeed = Literal["whole_sequences", "reference", "teacher"]
"""Inputs of a loss other than the log-probabilities of trainer and engine and the advantages of its tokens.

``whole_sequences``: all tokens of a rollout at once, also those that other context-parallel ranks have. Logits are then
computed a second time where ``trainer.memory.lm_head_chunk_tokens`` is set. ``reference``: log-probabilities of the
reference of ``algorithm.kl``. ``teacher``: those of the teacher of ``algorithm.distillation``.
"""


class _LossConfig(StrictModel):
    """Settings of a token-level policy loss; formulas and sources in docs/algorithms.md."""

    @property
    def needed(self) -> frozenset[LossNeed]:
        """Return what the loss needs of the trainer."""
        return frozenset()

    @property
    def is_of_rollouts(self) -> bool:
        """Return whether a token's loss depends on all tokens of its rollout, also on those that other ranks have."""
        return "whole_sequences" in self.needed


class MaskedRatioLossConfig(_LossConfig):
    """Importance ratio with tokens masked by probability difference; the reference run uses it."""

    kind: Literal["masked_ratio"] = "masked_ratio"
    """Importance ratio with tokens masked by probability difference."""
    mask_low: PositiveFloat = 0.2
    """Largest fall of a sampled token's probability (engine to trainer) that still counts."""
    mask_high: PositiveFloat = 0.2
    """Largest rise of a sampled token's probability that still counts."""
    kl_tau: NonNegativeFloat = 1e-3
    """Weight of the squared log-ratio that keeps trainer and engine close."""


class IcepopLossConfig(_LossConfig):
    """Importance weight between engine and trainer, 0 outside a band."""

    kind: Literal["icepop"]
    """Double-sided mask on the ratio."""
    ratio_low: PositiveFloat = 0.5
    """Smallest importance ratio that counts."""
    ratio_high: PositiveFloat = 5.0
    """Largest importance ratio that counts."""


class TisLossConfig(_LossConfig):
    """Importance weight between engine and trainer, truncated from above."""

    kind: Literal["tis"]
    """Truncated ratio."""
    ratio_high: PositiveFloat = 5.0
    """Importance ratio at which weights are cut."""


class _ClipConfig(_LossConfig):
    clip_low: PositiveFloat = 0.2
    """Lower clip distance from 1."""
    clip_high: PositiveFloat = 0.28
    """Upper clip distance from 1."""


class PpoClipLossConfig(_ClipConfig):
    """Clipped objective of PPO with the engine as the old policy; ``clip_high`` above ``clip_low`` is DAPO's."""

    kind: Literal["ppo_clip"]
    """Clipped ratio."""


class CispoLossConfig(_ClipConfig):
    """Policy gradient weighted by a clipped ratio: no token loses its gradient."""

    kind: Literal["cispo"]
    """Clipped weight."""


class GspoLossConfig(_ClipConfig):
    """Clipped objective of PPO on the geometric mean of a rollout's ratios."""

    kind: Literal["gspo"]
    """Clipped ratio of the whole rollout."""

    @property
    def needed(self) -> frozenset[LossNeed]:
        """Return what the loss needs of the trainer."""
        return frozenset({"whole_sequences"})


class CustomLossConfig(_LossConfig):
    """A loss of your own (docs/extending.md). Ranks of the trainer import it."""

    kind: Literal["custom"]
    """A loss of your own."""
    loss: ExtensionName
    """``package.module:Name`` of a `hpcrl.trainer.token_loss.TokenLoss`, or the name under which an installed package
    registers one."""
    parameters: dict[str, Any] = {}
    """Its parameters, checked by its own model."""
    needs: Annotated[tuple[LossNeed, ...], Field(strict=False)] = ()
    """What the class declares that it needs: plans are made without importing it. ``whole_sequences``: all tokens of a
    rollout at once; ``reference``: the log-probabilities of the reference of ``algorithm.kl``; ``teacher``: those of
    the teacher of ``algorithm.distillation``."""
    try_before_submit: bool = True
    """``hpcrl recipe check`` and ``submit`` make it, too. Set ``false`` if it can only be created on a node."""

    @property
    def needed(self) -> frozenset[LossNeed]:
        """Return what the loss needs of the trainer."""
        return frozenset(self.needs)


_Losses = (
    MaskedRatioLossConfig
    | IcepopLossConfig
    | TisLossConfig
    | PpoClipLossConfig
    | CispoLossConfig
    | GspoLossConfig
    | CustomLossConfig
)
_SETTINGS: dict[str, dict[str, Any]] = {
    model.model_fields["kind"].annotation.__args__[0]: {
        name: field.default for name, field in model.model_fields.items() if name != "kind"
    }
    for model in get_args(_Losses)
}
"""Default of each setting, by the loss that has it."""
_ALL_SETTINGS = frozenset(name for settings in _SETTINGS.values() for name in settings)


def _of_kind(given: Any) -> Any:
    """Complete and clean the settings of a loss.

    A loss without ``kind`` is ``masked_ratio``. Settings of other losses are left out where they have their default:
    recipes of runs that earlier versions began name the settings of all losses, and a resume may choose another loss.

    Raises
    ------
    ValidationError
        A setting of another loss has another value, which would have no effect.
    """
    if not isinstance(given, dict):
        return given
    kind = given.get("kind", "masked_ratio")
    if not isinstance(kind, str) or kind not in _SETTINGS:
        return given
    own, kept, errors = _SETTINGS[kind], {"kind": kind}, list[InitErrorDetails]()
    for name, value in given.items():
        others = [settings[name] for settings in _SETTINGS.values() if name in settings]
        if name == "kind" or name in own or not others:
            kept[name] = value
        elif value not in others:
            reason = PydanticCustomError("no_effect", "has no effect on the loss {kind}", {"kind": repr(kind)})
            errors.append(InitErrorDetails(type=reason, loc=(name,), input=value))
    if errors:
        raise ValidationError.from_exception_data("loss", errors)
    return kept


def settings_of_other_losses(given: Mapping[str, Any]) -> list[str]:
    """Return the settings in a loss section that only other losses have; none where its kind is not known."""
    own = _SETTINGS.get(str(given.get("kind", "masked_ratio")))
    return [] if own is None else [name for name in given if name not in {"kind", *own} and name in _ALL_SETTINGS]


def _advantage_form(given: Any) -> str:
    return "name" if isinstance(given, str) else "section"


LossConfig = Annotated[_Losses, Field(discriminator="kind"), BeforeValidator(_of_kind)]
"""The token-level policy loss; formulas and sources in docs/algorithms.md."""


class CustomAdvantageConfig(StrictModel):
    """Advantages of your own (docs/extending.md). The orchestrator imports them."""

    function: ExtensionName
    """``package.module:name`` of a function of the rewards and lengths of a group, or the name under which an installed
    package registers one."""
    parameters: dict[str, Any] = {}
    """Keyword arguments for it."""
    try_before_submit: bool = True
    """``hpcrl recipe check`` and ``submit`` call it, too. Set ``false`` if it can only be created on a node."""


AdvantageConfig = Annotated[
    Annotated[Literal["grpo", "mean_baseline"], Tag("name")] | Annotated[CustomAdvantageConfig, Tag("section")],
    Discriminator(_advantage_form),
]
"""Name of an advantage, or a section for one of your own."""


class KlConfig(StrictModel):
    """A penalty on the distance of the policy from a reference, on each trained token.

    The reference, the start model or a later version of the policy, is computed in addition to the policy in each
    micro-batch, from a frozen copy in ``trainer.dtype``; with ``trainer.lora`` it is the policy without its adapters,
    which takes no memory.
    """

    coefficient: NonNegativeFloat
    """Weight of the penalty. 0 for a loss of your own that ``needs`` the reference and computes with it by itself."""
    estimator: Literal["weighted_k3", "k3"] = "weighted_k3"
    """Estimator of the divergence from the policy to the reference, with ``applied_to: loss``. ``weighted_k3`` has the
    importance ratio of trainer to engine as a factor, so that its gradient is that of the divergence (DeepSeek-V3.2,
    arXiv 2512.02556, section 3.1); ``k3`` is that of GRPO (arXiv 2402.03300), without the factor."""
    applied_to: Literal["loss", "reward"] = "loss"
    """``loss``: the estimate is added to the loss of a token. ``reward``: the log-ratio of policy to reference is taken
    from the token's advantage."""
    reference_every_steps: PositiveInt | None = None
    """Number of steps after which the policy becomes the new reference; the reference is in checkpoints then. None: it
    stays the start model."""
    on_host: bool = False
    """The copy is in host memory, and comes to the device to be computed; always so with
    ``trainer.memory.parameter_offload``."""


class AlgorithmConfig(StrictModel):
    """Computation of advantages and the loss."""

    advantage: AdvantageConfig = "grpo"
    """``grpo``: reward minus group mean, divided by the group's standard deviation; ``mean_baseline``: not divided.
    Advantages of your own are a section with ``function`` and ``parameters``."""
    loss: LossConfig = MaskedRatioLossConfig()
    """The policy loss."""
    kl: KlConfig | None = None
    """Penalty on the distance from a reference, such as the start model; none where it is left out."""
    distillation: DistillationConfig | None = None
    """A teacher that the policy learns from, token by token; none where it is left out."""
