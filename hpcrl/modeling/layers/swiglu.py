"""The gate of feed-forward blocks, ``silu(gate) · up``, which keeps and makes less than autograd would."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def swiglu(*parts: Tensor) -> Tensor:
    """Return ``silu(gate) · up``, ``[…, F]``.

    Parameters
    ----------
    parts:
        Gate and up, ``[…, F]`` each, or one tensor ``[…, 2F]`` that has them one behind the other. The backward pass
        puts their gradients into their memory, so no other computation may need them then.
    """
    if torch.compiler.is_compiling():
        gate, up = _gate_and_up(parts)
        return F.silu(gate) * up
    product: Tensor = _SwiGLU.apply(*parts)  # type: ignore[no-untyped-call]
    return product


def _gate_and_up(parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return parts[0].chunk(2, dim=-1) if len(parts) == 1 else parts


class _SwiGLU(torch.autograd.Function):
    """By hand, because autograd keeps ``silu(gate)`` and makes three more tensors of its size in the backward pass."""

    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:
        ctx.save_for_backward(*parts)
        gate, up = _gate_and_up(parts)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        parts: tuple[Tensor, ...] = ctx.saved_tensors
        gate, up = _gate_and_up(parts)
        of_silu = grad * up
        torch.ops.aten.silu.out(gate, out=up).mul_(grad)
        torch.ops.aten.silu_backward(of_silu, gate, grad_input=gate)
        return parts
