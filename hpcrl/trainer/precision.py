"""What a recipe says of precision, put to work in a model."""

from __future__ import annotations

import torch

from hpcrl.config.precision import Fp8Config
from hpcrl.modeling.decoder import Decoder
from hpcrl.modeling.fp8.backends import Backend
from hpcrl.modeling.fp8.find import find_backend
from hpcrl.modeling.fp8.layers import use_fp8
from hpcrl.weights.format.quantize import QuantisedModules

__all__ = ["apply_precision", "find_precision", "quantised_modules"]


def find_precision(config: Fp8Config | None, device: torch.device) -> Backend | None:
    """What multiplies in FP8 on ``device``; None where nothing has to (UsageError as `find_backend`)."""
    return None if config is None else find_backend(config.backend, device)


def quantised_modules(config: Fp8Config | None) -> QuantisedModules:
    """What is in FP8 here, and so in versions of kind ``fp8``; of a trainer without FP8 all that versions can have."""
    return (
        QuantisedModules() if config is None else QuantisedModules(config.linears, config.experts, tuple(config.keep))
    )


def apply_precision(model: Decoder, config: Fp8Config | None, backend: Backend | None) -> None:
    """Let ``model``, which is not sharded yet, multiply as ``config`` says (UsageError as `use_fp8`)."""
    if backend is not None:
        use_fp8(model, quantised_modules(config), backend)
