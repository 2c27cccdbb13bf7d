"""Differentiable collectives: gradients go through the inverse collective."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.distributed_c10d import GroupName

from hpcrl.modeling.compile.saved_ops import register_op


def exchange_rows(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Exchange ``rows`` all-to-all, ``[sum(sent), …]`` to ``[sum(received), …]``, both by rank of ``group``."""
    result: Tensor = _Exchange.apply(rows, sent, received, group)  # type: ignore[no-untyped-call]
    return result


def gather_rows(
    rows: Tensor, group: dist.ProcessGroup, *, beside: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return ``[n, …]`` of each rank of ``group`` concatenated; ``n`` is the same on all.

    ``beside``, ``[n, b]`` where ``rows`` are ``[n, r]``, travels with them in one collective and has no gradient.
    """
    if beside is None:
        everywhere: Tensor = _Gather.apply(rows, None, group)  # type: ignore[no-untyped-call]
        return everywhere, None
    both: tuple[Tensor, Tensor] = _Gather.apply(rows, beside, group)  # type: ignore[no-untyped-call]
    return both


def sum_over(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of ``values``, of one shape and dtype on all ranks of ``group``, in new memory.

    A collective, and so is its backward pass: the loss of each rank may depend on the sum, all gradients count.
    """
    total: Tensor = _Sum.apply(values, group)  # type: ignore[no-untyped-call]
    return total


class _Sum(torch.autograd.Function):
    # every rank's loss may depend on the sum, so the gradient of each addend is the sum of all ranks' gradients
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return sum_over(gradients[0], ctx.group), None


@register_op("(Tensor rows, int[] sent, int[] received, str group) -> Tensor")
def _all_to_all(rows: Tensor, sent: list[int], received: list[int], group: str) -> Tensor:
    # the group is passed by name: operators of torch take no process groups
    result = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(result, rows.contiguous(), received, sent, group=_resolve_process_group(GroupName(group)))
    return result


@register_op("(Tensor rows, str group) -> Tensor")
def _all_gather(rows: Tensor, group: str) -> Tensor:
    ranks = _resolve_process_group(GroupName(group))
    found = rows.new_empty(dist.get_world_size(ranks) * rows.shape[0], *rows.shape[1:])
    # not into a list: NCCL would gather into memory of its own, and copy from there
    # torch 2.13 has a new name for it, and warns of the old one
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(found, rows, group=ranks)
    return found


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        # the gradient of a received row belongs to its sender: the same exchange with swapped sizes
        ctx.way_back = received, sent, group
        return _all_to_all(rows, sent, received, group.group_name)

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
        # one tensor and so one collective: a second one would cost its latency again
        sent = rows.contiguous() if beside is None else torch.cat((rows, beside.to(rows.dtype)), dim=-1)
        found = _all_gather(sent, group.group_name)
        if beside is None:
            return found
        width = rows.shape[-1]
        # copies: an output without gradient must not share memory with one that has a gradient
        everywhere, others = found[..., :width].contiguous(), found[..., width:].to(beside.dtype, copy=True)
        ctx.mark_non_differentiable(others)
        return everywhere, others

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        # every rank has used every row, so their gradients are added: at least in float32, and in the order of ranks,
        # which a reduce-scatter does not guarantee
        gradient = gradients[0]
        ranks = dist.get_world_size(ctx.group)
        equal = [len(gradient) // ranks] * ranks
        parts = exchange_rows(gradient, equal, equal, ctx.group).view(ranks, -1, *gradient.shape[1:])
        return parts.sum(0, dtype=torch.promote_types(gradient.dtype, torch.float32)).to(gradient.dtype), None, None
