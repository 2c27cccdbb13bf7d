"""Preparation of a rank's device before it loads a model."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hpcrl.config.plan import Plan
from hpcrl.config.recipe import Recipe
from hpcrl.trainer.determinism import settle_determinism
from hpcrl.trainer.memory.gpu_share import keep_to_share
from hpcrl.trainer.parallel.device_check import check_device


def prepare_device(device: torch.device, recipe: Recipe, plan: Callable[[], Plan]) -> None:
    """Check that the device is the planned one, and set determinism and the limit of memory.

    Raises
    ------
    UsageError
        See `check_device` and `settle_determinism`.
    """
    check_device(device, plan)
    settle_determinism(device, wanted=recipe.trainer.deterministic)
    keep_to_share(device, recipe)
