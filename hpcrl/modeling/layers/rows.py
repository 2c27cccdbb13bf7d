"""Rows of tokens on their way to experts and back: permutations, copies for several experts, and sums by weight.

Gradients are written by hand: autograd's indexing adds them up row by row, and makes and keeps unneeded copies. Sums
are over the places of a token in their order, whatever the order of rows is: equal input gives equal sums.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


class RowOrder(NamedTuple):
    """Order of rows that are sorted by expert. A token has ``k`` places, each of which has a row or none.

    Attributes
    ----------
    places:
        ``[rows]`` int64: the place of each row, ``token · k + i``.
    by_token:
        ``[rows]`` int64: numbers of the rows in the order of their places.
    starts:
        ``[T]`` int64: first index of each token's rows in ``by_token``.
    k:
        Places of a token.
    """

    places: Tensor
    by_token: Tensor
    starts: Tensor
    k: int

    @classmethod
    def of(cls, places: Tensor, tokens: int, k: int) -> RowOrder:
        """Make an order from ``places`` of ``tokens``: all places, or those that have a row."""
        rows = len(places)
        if rows == tokens * k:
            return cls(places, inverse(places), torch.arange(0, rows, k, device=places.device), k)
        counts = torch.zeros(tokens, dtype=torch.int64, device=places.device)
        counts.scatter_add_(0, places // k, torch.ones_like(places))
        return cls(places, places.argsort(), counts.cumsum(0) - counts, k)


def inverse(order: Tensor) -> Tensor:
    """Return the permutation that undoes ``order``, ``[n]`` int64."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def permute_rows(x: Tensor, order: Tensor, back: Tensor) -> Tensor:
    """Return ``x [n, D]`` in the order of the permutation ``order [n]``, which ``back [n]`` undoes."""
    permuted: Tensor = _Permute.apply(x, order, back)  # type: ignore[no-untyped-call]
    return permuted


def copy_rows(x: Tensor, rows: RowOrder) -> Tensor:
    """Copy for each row its token of ``x [T, D]``: ``[rows, D]``."""
    copies: Tensor = _Copy.apply(x, rows)  # type: ignore[no-untyped-call]
    return copies


def mix_rows(y: Tensor, rows: RowOrder, weights: Tensor) -> Tensor:
    """Sum for each token its rows of ``y [rows, D]`` by weight: ``[T, D]``.

    ``weights`` are ``[T, k]``; they are rounded to the dtype of ``y``. What stands in places without a row is not read,
    and its gradient is 0.
    """
    mixed: Tensor = _Mix.apply(y, weights, rows)  # type: ignore[no-untyped-call]
    return mixed


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, *ctx.saved_tensors), None, None


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: RowOrder) -> Tensor:
        # saved tensors are released with a recomputed layer; attributes of ``ctx`` would be kept
        ctx.save_for_backward(rows.by_token, rows.starts)
        return x.index_select(0, rows.places // rows.k)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        by_token, starts = ctx.saved_tensors
        return _sum_bags(grad, by_token, starts), None


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor, rows: RowOrder) -> Tensor:
        places, by_token, starts, ctx.k = rows
        ctx.save_for_backward(y, weights, places)
        shares = weights.flatten().index_select(0, places.index_select(0, by_token)).to(y.dtype)
        return _sum_bags(y.detach(), by_token, starts, shares)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        y, weights, places = ctx.saved_tensors
        of_rows, of_weights = grad.index_select(0, places // ctx.k), None
        if ctx.needs_input_grad[1]:
            # products of rows of both; the operator for it in `embedding_bag` has no bfloat16 on GPUs
            of_shares = torch.bmm(of_rows[:, None], y[:, :, None]).flatten()
            of_weights = weights.new_zeros(weights.numel()).index_copy_(0, places, of_shares.to(weights.dtype))
            of_weights = of_weights.view(weights.shape)
        shares = weights.flatten().index_select(0, places).to(y.dtype)
        return of_rows.mul_(shares[:, None]), of_weights, None


def _sum_bags(rows: Tensor, order: Tensor, starts: Tensor, shares: Tensor | None = None) -> Tensor:
    """Return sums over rows, ``[bags, D]``; bags are ranges of ``order`` and ``shares`` that begin at ``starts``."""
    if not len(starts):
        return rows.new_zeros(0, rows.shape[1])
    return F.embedding_bag(order, rows.contiguous(), starts, mode="sum", per_sample_weights=shares)
