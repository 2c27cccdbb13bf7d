"""Losses of recipes, for tests that compute with them."""

from __future__ import annotations

from typing import Any

from hpcrl.config.algorithm import AlgorithmConfig, LossConfig, MaskedRatioLossConfig
from hpcrl.trainer.step.losses import make_loss
from hpcrl.trainer.token_loss import TokenLoss

ALL_SETTINGS = ("mask_low", "mask_high", "kl_tau", "ratio_low", "ratio_high", "clip_low", "clip_high")


def loss_config(kind: str = "masked_ratio", **settings: Any) -> LossConfig:
    """Settings of a loss as a recipe has them; those that the loss does not have are left out."""
    plain = AlgorithmConfig.model_validate({"loss": {"kind": kind}}).loss
    known = {name: value for name, value in settings.items() if name in type(plain).model_fields}
    assert set(settings) <= set(ALL_SETTINGS)
    return AlgorithmConfig.model_validate({"loss": {"kind": kind, **known}}).loss


def token_loss(kind: str = "masked_ratio", **settings: Any) -> TokenLoss:
    """Make a loss of hpcrl."""
    return make_loss(loss_config(kind, **settings))


assert type(loss_config()) is MaskedRatioLossConfig
