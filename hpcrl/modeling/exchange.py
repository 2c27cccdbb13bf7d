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


def gather_rows(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``[n, …]`` of each rank of ``group``, the same ``n`` on all, one behind the other."""
    result: Tensor = _Gather.apply(rows, group)  # type: ignore[no-untyped-call]
    return result


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
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        result = rows.new_empty(dist.get_world_size(group), *rows.shape)
        dist.all_gather(list(result), rows.contiguous(), group=group)
        return result.flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        # every rank has used every row: their gradients are added, in float32 and in the order of ranks
        (gradient,) = gradients
        ranks = dist.get_world_size(ctx.group)
        equal = [len(gradient) // ranks] * ranks
        parts = exchange_rows(gradient, equal, equal, ctx.group).view(ranks, -1, *gradient.shape[1:])
        return parts.sum(0, dtype=torch.float32).to(gradient.dtype), None
