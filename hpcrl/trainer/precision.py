"""Applies the precision settings of a recipe to a model."""

from __future__ import annotations

import torch

from hpcrl.config.precision import Fp8Config
from hpcrl.modeling.decoder import Decoder
from hpcrl.modeling.fp8.backends import Backend
from hpcrl.modeling.fp8.find_fp8 import find_backend
from hpcrl.modeling.fp8_layers import use_fp8
from hpcrl.weights.format.quantise import QuantisedModules


def find_precision(config: Fp8Config | None, device: torch.device) -> Backend | None:
    """Return the FP8 backend for ``device``; None without FP8 (UsageError as `find_backend`)."""
    return None if config is None else find_backend(config.backend, device)


def quantised_modules(config: Fp8Config | None) -> QuantisedModules:
    """Return the modules in FP8, in the trainer and in versions of kind ``fp8``; without FP8 all that can be."""
    return (
        QuantisedModules() if config is None else QuantisedModules(config.linears, config.experts, tuple(config.keep))
    )


def apply_precision(model: Decoder, config: Fp8Config | None, backend: Backend | None) -> None:
    """Make ``model``, which is not sharded yet, multiply according to ``config`` (UsageError as `use_fp8`)."""
    if backend is not None:
        use_fp8(model, quantised_modules(config), backend)
