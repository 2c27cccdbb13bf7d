"""What a sharded model publishes, and which rank has which part of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from hpcrl.modeling.hf import to_hf_tensors
from hpcrl.models.arch import ModelArch
from hpcrl.weights.format.layout import PublishedTensor, Run, block_runs
from hpcrl.weights.format.quantize import BLOCK, FP8_DTYPE, is_quantised, scale_tensor
from hpcrl.weights.format.shard import SAFETENSORS_DTYPES

__all__ = ["Block", "Form", "Source", "find_sources", "is_cut", "local_block", "local_part", "source_runs"]


class Block(NamedTuple):
    """The part of a parameter that a rank holds: ``low <= index < high``."""

    low: tuple[int, ...]
    high: tuple[int, ...]


class Form(Enum):
    """What becomes of the elements of a parameter."""

    PLAIN = "plain"
    QUANTISED = "quantised"
    SCALES = "scales"


class Source(NamedTuple):
    """Where a published tensor comes from.

    Attributes
    ----------
    tensor:
        What is published.
    parameter:
        Name of the parameter.
    low:
        First index of the region of the parameter.
    shape:
        Of the region, without the leading dimensions in which it has one element (an expert's number).
    form:
        What becomes of it.
    """

    tensor: PublishedTensor
    parameter: str
    low: tuple[int, ...]
    shape: tuple[int, ...]
    form: Form


def find_sources(model: nn.Module, arch: ModelArch, dtype: torch.dtype, *, fp8: bool) -> list[Source]:
    """The published tensors of ``model`` in its order of parameters.

    Raises
    ------
    ValueError
        A published tensor is no block of one parameter.
    """
    name_of_dtype = str(dtype).removeprefix("torch.")
    sources = []
    for name, parameter in model.named_parameters():
        whole = torch.empty(parameter.shape, device="meta")
        for hf_name, view in to_hf_tensors(name, whole, arch):
            low, shape = _unravel(int(view.storage_offset()), whole.shape), tuple(view.shape)
            leading = whole.dim() - view.dim()
            fits = all(a + b <= c for a, b, c in zip(low[leading:], shape, whole.shape[leading:], strict=True))
            if leading < 0 or not view.is_contiguous() or not fits or view.stride() != whole.stride()[leading:]:
                raise ValueError(f"published tensor {hf_name!r} is no block of the parameter {name!r}")
            if fp8 and is_quantised(hf_name, shape):
                quantised = PublishedTensor(hf_name, FP8_DTYPE, shape)
                sources.append(Source(quantised, name, low, shape, Form.QUANTISED))
                sources.append(Source(scale_tensor(hf_name, shape), name, low, shape, Form.SCALES))
            else:
                tensor = PublishedTensor(hf_name, name_of_dtype, shape)
                sources.append(Source(tensor, name, low, shape, Form.PLAIN))
    return sources


def _unravel(position: int, shape: Sequence[int]) -> tuple[int, ...]:
    index = []
    for size in reversed(shape):
        position, i = divmod(position, size)
        index.append(i)
    return tuple(reversed(index))


def local_block(parameter: Tensor) -> Block:
    """The part of ``parameter`` that this rank holds: all of it where it is not sharded."""
    if not isinstance(parameter, DTensor):
        return Block((0,) * parameter.dim(), tuple(parameter.shape))
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    if len(offset) != len(shape):  # this rank is not in the mesh of the parameter
        return Block((0,) * parameter.dim(), (0,) * parameter.dim())
    return Block(tuple(offset), tuple(o + s for o, s in zip(offset, shape, strict=True)))


def _overlap(source: Source, block: Block) -> Block:
    """What ``block`` holds of the source, in the region's own indices; an empty block where that is nothing."""
    leading = len(source.low) - len(source.shape)
    nothing = Block((0,) * len(source.shape), (0,) * len(source.shape))
    for i in range(leading):
        if not block.low[i] <= source.low[i] < block.high[i]:
            return nothing
    low, high = [], []
    for i, size in enumerate(source.shape, start=leading):
        low.append(max(block.low[i] - source.low[i], 0))
        high.append(min(block.high[i] - source.low[i], size))
    return Block(tuple(low), tuple(high)) if all(a < b for a, b in zip(low, high, strict=True)) else nothing


def _published_block(source: Source, block: Block) -> Block:
    """What ``block`` holds of the published tensor. A scale goes with the first element of its 128 x 128."""
    part = _overlap(source, block)
    if source.form is not Form.SCALES:
        return part
    if part.high[0] == 0:
        return part
    return Block(tuple(-(-i // BLOCK) for i in part.low), tuple(-(-i // BLOCK) for i in part.high))


def source_runs(source: Source, blocks: Sequence[Block], spread: int) -> list[Run]:
    """Which rank provides which bytes of the published tensor, in order.

    Parameters
    ----------
    source:
        The published tensor.
    blocks:
        The part of its parameter that each rank holds. Of ranks that hold the same, one provides it.
    spread:
        Any number; varies which of them.
    """
    holders: dict[Block, list[int]] = {}
    for rank, block in enumerate(blocks):
        holders.setdefault(block, []).append(rank)
    width = SAFETENSORS_DTYPES[source.tensor.dtype][1]
    runs = []
    for block, ranks in holders.items():
        part = _published_block(source, block)
        rank = ranks[spread % len(ranks)]
        for first, count in block_runs(source.tensor.shape, part.low, part.high):
            runs.append(Run(rank, first * width, count * width))
    return sorted(runs, key=lambda run: run.start)


def is_cut(source: Source, blocks: Sequence[Block]) -> bool:
    """Whether some 128 x 128 of the source lies on several ranks."""
    for block in blocks:
        part = _overlap(source, block)
        if math.prod(part.high) == 0:
            continue
        for low, high, size in zip(part.low, part.high, source.shape, strict=True):
            if low % BLOCK or (high % BLOCK and high != size):
                return True
    return False


def local_part(parameters: Mapping[str, Tensor], source: Source) -> tuple[Block, Tensor]:
    """What this rank holds of a source: where in the region, and a view of it with the region's dimensions."""
    parameter = parameters[source.parameter]
    block = local_block(parameter)
    part = _overlap(source, block)
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    if math.prod(part.high) == 0:
        return part, local.new_empty((0,) * len(source.shape))
    leading = len(source.low) - len(source.shape)
    for i in range(leading):
        local = local[source.low[i] - block.low[i]]
    for i, (low, high) in enumerate(zip(part.low, part.high, strict=True)):
        local = local.narrow(i, source.low[leading + i] + low - block.low[leading + i], high - low)
    return part, local
