"""Linear and grouped products in block FP8, with gradients.

Forward and the gradient of the input: rows times blocks of the weight, which is quantised once and turned over for the
second. Gradient of the weight: both sides in rows along tokens, because the sum goes over these. What is kept for the
backward pass are the operands as they were; they are quantised again there, so that no layer holds FP8 copies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hpcrl.modeling.compile.saved_ops import register_op
from hpcrl.modeling.fp8.backends import Backend, Groups
from hpcrl.modeling.fp8.quantiser import Quantised, Quantiser, quantise_blocks
from hpcrl.weights.format.quantise import BLOCK

_IN_USE: dict[str, Backend] = {}
"""Backends by name: an operator of torch takes names, but not such objects."""


def linear_product(x: Tensor, weight: Tensor, backend: Backend) -> Tensor:
    """Return ``x @ weight.T`` of ``[T, in]`` and ``[out, in]``: ``[T, out]`` in the dtype of ``x``."""
    y: Tensor = _Linear.apply(x, weight, backend)  # type: ignore[no-untyped-call]
    return y


def grouped_product(x: Tensor, weight: Tensor, counts: Tensor, backend: Backend, *, parts: int = 1) -> Tensor:
    """Multiply rows that are sorted by expert, each by its expert's matrix.

    Parameters
    ----------
    x:
        ``[rows, in]``.
    weight:
        ``[experts, out, in]``.
    counts:
        ``[experts]`` int64 rows of each; any may be 0.
    parts:
        Matrices that lie one behind the other in each expert's, and are quantised (and published) apart.

    Returns
    -------
    Tensor
        ``[rows, out]`` in the dtype of ``x``.
    """
    _IN_USE[backend.name] = backend
    y: Tensor = _Grouped.apply(x, weight, counts, (backend, parts))  # type: ignore[no-untyped-call]
    return y


def rounded(weight: Tensor) -> Tensor:
    """Return ``weight [out, in]`` rounded to FP8, in its own dtype, for callers that multiply in another way.

    The gradient goes through as if nothing had been rounded.
    """
    y: Tensor = _Rounded.apply(weight)  # type: ignore[no-untyped-call]
    return y


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        rows, columns = weight.shape
        return quantise_blocks(weight).dequantised()[:rows, :columns].to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, backend: Backend) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.backend = backend
        rows, blocks = backend.quantiser.rows(x), backend.quantiser.blocks(weight)
        return backend.multiply(rows, blocks, x.dtype)[:, : len(weight)].contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (grad,), (x, weight) = gradients, ctx.saved_tensors
        backend: Backend = ctx.backend
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            blocks = backend.quantiser.blocks(weight).mT
            of_x = backend.multiply(backend.quantiser.rows(grad), blocks, x.dtype)[:, : x.shape[1]]
        if ctx.needs_input_grad[1]:
            of_weight = backend.multiply_rows(backend.quantiser.rows(grad.T), backend.quantiser.rows(x.T))
            of_weight = of_weight.to(weight.dtype)
        return of_x, of_weight, None


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: Tensor, how: tuple[Backend, int]) -> Tensor:
        ctx.save_for_backward(x, weight, counts)
        ctx.backend, ctx.parts = how
        return _fp8_grouped_product(x, weight, counts, ctx.parts, ctx.backend.name)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (grad,), (x, weight, counts) = gradients, ctx.saved_tensors
        backend: Backend = ctx.backend
        experts, out, inside = weight.shape
        groups = Groups.of(counts, len(x))
        spread = _spread_apart(groups, grad, ctx.parts)
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            blocks = _blocks(weight, ctx.parts, backend.quantiser).mT
            product = backend.multiply_groups(backend.quantiser.rows(spread), blocks, groups, x.dtype)
            of_x = product[groups.places, :inside]
        if ctx.needs_input_grad[1]:
            rows = backend.quantiser.rows(groups.spread(x).T)
            sums = backend.multiply_within_groups(backend.quantiser.rows(spread.T), rows, groups)
            of_weight = torch.unflatten(sums, 1, (ctx.parts, -1))[:, :, : out // ctx.parts].reshape(
                experts, out, inside
            )
            of_weight = of_weight.to(weight.dtype)
        return of_x, of_weight, None, None


@register_op("(Tensor x, Tensor weight, Tensor counts, int parts, str backend) -> Tensor")
def _fp8_grouped_product(x: Tensor, weight: Tensor, counts: Tensor, parts: int, backend: str) -> Tensor:
    quantiser = _IN_USE[backend].quantiser
    groups, blocks = Groups.of(counts, len(x)), _blocks(weight, parts, quantiser)
    rows = quantiser.rows(groups.spread(x))
    product = _IN_USE[backend].multiply_groups(rows, blocks, groups, x.dtype)
    y = x.new_empty(len(x), weight.shape[1])
    # FSDP2 wants no view of something larger
    cut = torch.unflatten(product, 1, (parts, -1))[:, :, : y.shape[1] // parts]
    # into its place: an index would make a second copy of all rows first
    torch.index_select(cut, 0, groups.places, out=torch.unflatten(y, 1, (parts, -1)))
    return y


def _blocks(weight: Tensor, parts: int, quantiser: Quantiser) -> Quantised:
    """Return ``[experts, out, in]`` with each part at a block's start: ``[experts, parts · whole blocks, ...]``."""
    blocks = quantiser.blocks(torch.unflatten(weight, 1, (parts, -1)))
    return Quantised(blocks.values.flatten(1, 2), blocks.scales.flatten(1, 2))


def _spread_apart(groups: Groups, rows: Tensor, parts: int) -> Tensor:
    """Return rows ``[rows, out]`` in their places, with zeros between them and at the ends of parts' last blocks."""
    cut = torch.unflatten(rows, 1, (parts, -1))
    size = cut.shape[2]
    made = rows.new_zeros(len(groups.experts), parts, -(-size // BLOCK) * BLOCK)
    made[..., :size].index_copy_(0, groups.places, cut)
    return made.flatten(1)
