"""Blocks: the part of a tensor that a rank holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeGuard

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class HeldBlock(NamedTuple):
    """The part of a tensor that a rank holds: ``low <= index < high``."""

    low: tuple[int, ...]
    high: tuple[int, ...]

    @property
    def is_empty(self) -> bool:
        return any(low >= high for low, high in zip(self.low, self.high, strict=True))


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return whether ``tensor`` is a DTensor.

    An engine never has one, and does not import DTensor, which takes half a second.
    """
    return hasattr(tensor, "to_local")


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of ``tensor``, which shares its memory: all of it if it is not sharded."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def local_block(tensor: Tensor) -> HeldBlock:
    """Return the block of ``tensor`` that this rank holds: all of it if it is not sharded.

    Indices are those of the whole tensor, one for each of its dimensions. The block is empty if the rank holds nothing,
    also if it is not in the mesh of the tensor.
    """
    if not is_sharded(tensor):
        return HeldBlock((0,) * tensor.dim(), tuple(tensor.shape))
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # noqa: PLC0415

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if len(offset) != len(shape):  # this rank is not in the mesh of the tensor
        return HeldBlock((0,) * tensor.dim(), (0,) * tensor.dim())
    return HeldBlock(tuple(offset), tuple(o + s for o, s in zip(offset, shape, strict=True)))


def overlap(block: HeldBlock, low: tuple[int, ...], shape: tuple[int, ...]) -> HeldBlock:
    """Return the part of a region that ``block`` holds, in the region's own indices; an empty block if there is none.

    Parameters
    ----------
    low, shape:
        First index of the region in the tensor, and its shape without leading dimensions in which it has one element.
    """
    leading = len(low) - len(shape)
    nothing = HeldBlock((0,) * len(shape), (0,) * len(shape))
    for i in range(leading):
        if not block.low[i] <= low[i] < block.high[i]:
            return nothing
    first, last = [], []
    for i, size in enumerate(shape, start=leading):
        first.append(max(block.low[i] - low[i], 0))
        last.append(min(block.high[i] - low[i], size))
    part = HeldBlock(tuple(first), tuple(last))
    return nothing if part.is_empty else part
