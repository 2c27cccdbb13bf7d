"""Which part of a tensor a rank holds."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

__all__ = ["Block", "local_block", "overlap"]


class Block(NamedTuple):
    """The part of a tensor that a rank holds: ``low <= index < high``."""

    low: tuple[int, ...]
    high: tuple[int, ...]

    @property
    def is_empty(self) -> bool:
        return any(low >= high for low, high in zip(self.low, self.high, strict=True))


def local_block(tensor: Tensor) -> Block:
    """The part of ``tensor`` that this rank holds: all of it where it is not sharded."""
    if not isinstance(tensor, DTensor):
        return Block((0,) * tensor.dim(), tuple(tensor.shape))
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if len(offset) != len(shape):  # this rank is not in the mesh of the tensor
        return Block((0,) * tensor.dim(), (0,) * tensor.dim())
    return Block(tuple(offset), tuple(o + s for o, s in zip(offset, shape, strict=True)))


def overlap(block: Block, low: tuple[int, ...], shape: tuple[int, ...]) -> Block:
    """What ``block`` holds of a region, in the region's own indices; an empty block where that is nothing.

    Parameters
    ----------
    low, shape:
        First index of the region in the tensor, and its shape without leading dimensions in which it has one element.
    """
    leading = len(low) - len(shape)
    nothing = Block((0,) * len(shape), (0,) * len(shape))
    for i in range(leading):
        if not block.low[i] <= low[i] < block.high[i]:
            return nothing
    first, last = [], []
    for i, size in enumerate(shape, start=leading):
        first.append(max(block.low[i] - low[i], 0))
        last.append(min(block.high[i] - low[i], size))
    part = Block(tuple(first), tuple(last))
    return nothing if part.is_empty else part
