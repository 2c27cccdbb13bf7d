"""Collectives that gradients go through the other way."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["exchange_rows", "gather_rows"]


def exchange_rows(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """All-to-all of ``rows``, ``[sum(sent), …]`` to ``[sum(received), …]``, both by rank of ``group``."""
    result: Tensor = _Exchange.apply(rows, sent, received, group)  # type: ignore[no-untyped-call]
    return result


def gather_rows(
    rows: Tensor, group: dist.ProcessGroup, *, beside: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """``[n, …]`` of each rank of ``group``, the same ``n`` on all, one behind the other.

    ``beside``, ``[n, b]`` where ``rows`` are ``[n, r]``, travels with them in one collective and has no gradient.
    """
    if beside is None:
        everywhere: Tensor = _Gather.apply(rows, None, group)  # type: ignore[no-untyped-call]
        return everywhere, None
    both: tuple[Tensor, Tensor] = _Gather.apply(rows, beside, group)  # type: ignore[no-untyped-call]
    return both


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.way_back = received, sent, group
        result = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = gradients
        return exchange_rows(gradient, *ctx.way_back), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, beside: Tensor | None, group: dist.ProcessGroup
    ) -> Tensor | tuple[Tensor, Tensor]:
        ctx.group = group
        sent = rows.contiguous() if beside is None else torch.cat((rows, beside.to(rows.dtype)), dim=-1)
        found = sent.new_empty(dist.get_world_size(group), *sent.shape)
        dist.all_gather(list(found), sent, group=group)
        found = found.flatten(0, 1)
        if beside is None:
            return found
        width = rows.shape[-1]
        # copies: what is returned shares no memory with what has a gradient
        everywhere, others = found[..., :width].contiguous(), found[..., width:].to(beside.dtype, copy=True)
        ctx.mark_non_differentiable(others)
        return everywhere, others

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        # every rank has used every row: their gradients are added, in float32 and in the order of ranks
        gradient = gradients[0]
        ranks = dist.get_world_size(ctx.group)
        equal = [len(gradient) // ranks] * ranks
        parts = exchange_rows(gradient, equal, equal, ctx.group).view(ranks, -1, *gradient.shape[1:])
        return parts.sum(0, dtype=torch.float32).to(gradient.dtype), None, None
