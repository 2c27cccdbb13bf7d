"""A digest of the weights that adapters were trained on, equal on every mesh, from what ranks hold of them."""

from __future__ import annotations

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn

from hpcrl.modeling.blocks import local_block, local_part
from hpcrl.modeling.hf import model_tensors

_PIECE = 1 << 22
"""Numbers that are processed at once."""
_ODD = -7046029254386353131
"""2**64 divided by the golden ratio, as a signed number (Knuth's multiplicative hash)."""


@torch.no_grad()
def base_digest(model: nn.Module, group: dist.ProcessGroup) -> Tensor:
    """Return a position-dependent sum of all bits of the model's own tensors, ``[1]`` int64 on the host. Collective.

    ``group`` are the ranks that together have every tensor once; buffers, which all of them have whole, count once too.
    """
    total = torch.zeros(1, dtype=torch.int64)
    rank = dist.get_rank(group)
    for name, tensor in model_tensors(model).items():
        if isinstance(tensor, nn.Parameter) or hasattr(tensor, "to_local") or rank == 0:
            total += tensor_digest(name, tensor)
    dist.all_reduce(total, group=group)
    return total


@torch.no_grad()
def tensor_digest(name: str, tensor: Tensor) -> Tensor:
    """Return the part of `base_digest` for the elements that this rank holds: ``[1]`` int64 on the host."""
    return _sum_of(tensor) * _signed(xxhash.xxh3_64_intdigest(name) | 1)


def _sum_of(tensor: Tensor) -> Tensor:
    """Return the sum of each element's bits times an odd number that depends on its position."""
    local, block = local_part(tensor), local_block(tensor)
    if local.numel() == 0:
        return torch.zeros(1, dtype=torch.int64)
    # place of the first number of each row, in the whole tensor
    places = torch.zeros((), dtype=torch.int64, device=local.device)
    for low, high, size in zip(block.low[:-1], block.high[:-1], tensor.shape[:-1], strict=True):
        places = (places[..., None] * size + torch.arange(low, high, device=local.device)).flatten()
    width = tensor.shape[-1] if tensor.dim() else 1
    first, last = (block.low[-1], block.high[-1]) if tensor.dim() else (0, 1)
    columns = torch.arange(first, last, device=local.device)
    bits = local.detach().contiguous().view({2: torch.int16, 4: torch.int32}[local.element_size()])
    rows = bits.reshape(-1, last - first)
    total = torch.zeros(1, dtype=torch.int64, device=local.device)
    step = max(1, _PIECE // (last - first))
    starts = places.reshape(-1, 1)
    for begin in range(0, len(rows), step):
        at = starts[begin : begin + step] * width + columns
        mixed = at * _ODD
        total += (rows[begin : begin + step].long() * (mixed ^ (mixed >> 29) | 1)).sum()
    return total.cpu()


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number
