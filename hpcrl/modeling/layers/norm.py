"""Root-mean-square norms, with a backward pass by hand."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hpcrl.models.arch import ModelArch


class RMSNorm(nn.Module):
    """Root-mean-square norm in float32 (Zhang and Sennrich 2019, arXiv 1910.07467), as transformers computes it."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[…, size]`` to the same shape."""
        if torch.compiler.is_compiling():
            return _normed(x, self.eps) * self.weight
        y: Tensor = _RMSNorm.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return y


class ZeroCentredRMSNorm(RMSNorm):
    """The same with weights around zero: values are multiplied with ``1 + weight`` in float32, and rounded behind."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps)
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[…, size]`` to the same shape."""
        if torch.compiler.is_compiling():
            return (_normed(x.float(), self.eps) * (1.0 + self.weight.float())).to(x.dtype)
        y: Tensor = _ZeroCentredRMSNorm.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return y


def norm_of(arch: ModelArch, size: int) -> RMSNorm:
    """Make a norm over ``size`` channels, of the kind that ``arch`` has."""
    return (ZeroCentredRMSNorm if arch.zero_centred_norms else RMSNorm)(size, arch.rms_norm_eps)


def _normed(x: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), (x.shape[-1],), None, eps).to(x.dtype)


class _RMSNorm(torch.autograd.Function):
    """RMS norm with its own gradient: autograd would keep a float32 copy of the input and the normed values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        normed = _normed(x, eps)
        return normed.mul_(weight) if normed.dtype == weight.dtype else normed * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        return _gradients(ctx, grad, x, weight)


class _ZeroCentredRMSNorm(torch.autograd.Function):
    """By hand as `_RMSNorm`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return _normed(x.float(), eps).mul_(1.0 + weight.float()).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, _ = _gradients(ctx, grad, x, 1.0 + weight.float())
        return of_x, None if of_weight is None else of_weight.to(weight.dtype), None


def _gradients(ctx: Any, grad: Tensor, x: Tensor, factors: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    """Return gradients of a norm's input and weight; ``factors [size]`` are the norm's from the forward pass."""
    of_x, of_weight, _ = ctx.needs_input_grad
    wide, size = x.float(), x.shape[-1]
    inverse = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(size).add_(ctx.eps).rsqrt_()
    # each value's part in the gradient of the weight; with the weight, in that of the length of x
    parts = (wide * grad).mul_(inverse)
    grad_weight = parts.reshape(-1, size).sum(0).to(factors.dtype) if of_weight else None
    if not of_x:
        return None, grad_weight, None
    factors = factors.to(parts.dtype)
    along = (parts @ factors)[..., None].mul_(inverse).mul_(inverse).div_(size)
    grad_x = torch.mul(grad, factors, out=parts).mul_(inverse).addcmul_(wide, along, value=-1.0)
    return grad_x.to(x.dtype), grad_weight, None
