"""Arithmetic of torch on a GPU of NVIDIA, where it differs from that on a processor, for tests without a GPU."""

from __future__ import annotations

from numbers import Number
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_QUOTIENTS = {torch.ops.aten.div.Tensor, torch.ops.aten.div.Scalar}
_IN_PLACE = {torch.ops.aten.div_.Tensor, torch.ops.aten.div_.Scalar}


class DividesAsCuda(TorchDispatchMode):
    """While it is entered, a float32 tensor over a number of the host is a product with the number's reciprocal.

    That is what ``aten/src/ATen/native/cuda/BinaryDivTrueKernel.cu`` of torch computes; the reciprocal is rounded to
    float32 first. A quotient of two tensors is rounded as IEEE says on both devices.
    """

    def __init__(self) -> None:
        super().__init__()
        self.quotients = 0
        """Quotients that a GPU rounds otherwise than a processor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in _QUOTIENTS | _IN_PLACE and args[0].dtype == torch.float32 and (over := _of_host(args[1])):
            self.quotients += 1
            reciprocal = float(1 / torch.tensor(over, dtype=torch.float32))
            return args[0].mul_(reciprocal) if func in _IN_PLACE else args[0] * reciprocal
        return func(*args, **(kwargs or {}))


def _of_host(divisor: Any) -> float | None:
    if isinstance(divisor, Tensor):
        # a number is a tensor without dimensions to some callers; 0 has no reciprocal
        return float(divisor) or None if divisor.ndim == 0 and divisor.device.type == "cpu" else None
    return float(divisor) if isinstance(divisor, Number) else None  # type: ignore[arg-type]
