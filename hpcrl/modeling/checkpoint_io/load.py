"""Weights of a model directory into a model: each rank reads the bytes of its own shards, and no others."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from hpcrl.modeling.blocks import HeldBlock, local_block, local_part, overlap
from hpcrl.modeling.checkpoint_io.mxfp4 import check_mxfp4_scales, read_mxfp4
from hpcrl.modeling.fp8.quantiser import dequantise
from hpcrl.modeling.hf import HfAdapter, Region, model_tensors
from hpcrl.weights.format.mxfp4 import MXFP4_DTYPE
from hpcrl.weights.format.quantise import BLOCK, FP8_DTYPE
from hpcrl.weights.read.model_files import ModelFiles
from hpcrl.weights.read.stored_weights import (
    SCALE_SUFFIX,
    config_key,
    dtype_problem,
    heads_differ_problem,
    quantised_weight,
    tied_name,
)

_PORTION_BYTES = 64 << 20
"""Maximum bytes that are held in addition to the model."""


@torch.no_grad()
def load_model_dir(model: nn.Module, adapter: HfAdapter, model_dir: Path) -> None:
    """Fill ``model``, whole or sharded, on any device. Not collective.

    Values are converted to the dtype of the model's tensors; matrices in FP8 and experts in MXFP4 are multiplied with
    the scales of their blocks.
    Tensors of multi-token prediction that the model does not carry (`hpcrl.modeling.checkpoint_io.carried`) are left
    out. Additional memory: some 64 MiB, or a row of a tensor in float32 if that is larger.

    Raises
    ------
    UsageError
        The directory has no whole safetensors files.
    ValueError
        They are not of this model (the message names directory and tensor): a tensor is missing, unknown or of
        another shape, its dtype or its scales cannot be read, or head and embedding are tied and stored with
        different values. Nothing was written then on this rank.
    """
    with ModelFiles(model_dir) as files:
        tensors = model_tensors(model)
        wanted = [
            (name, region) for name, own in tensors.items() for region in _regions(files, adapter, name, own.shape)
        ]
        blocks = {name: local_block(own) for name, own in tensors.items()}
        locals_ = {name: local_part(own) for name, own in tensors.items()}
        try:
            _check(files, [region for _, region in wanted], adapter)
            for name, region in wanted:
                part = overlap(blocks[name], region.low, region.shape)
                if not part.is_empty:
                    _check_values(files, adapter, region, part, tensors[name].dtype)
        except ValueError as error:
            raise ValueError(f"{model_dir}: {error}{_beside(files)}") from error
        for name, region in wanted:
            _read_region(files, region, locals_[name], blocks[name])


@torch.no_grad()
def read_whole(files: ModelFiles, adapter: HfAdapter, name: str, target: Tensor) -> None:
    """Fill ``target``, the model's tensor ``name`` in its shape and any dtype, from files that `load_model_dir` reads.

    Raises
    ------
    ValueError
        As `load_model_dir`, for the tensors that are read here; ``target`` is not written then.
    """
    regions = _regions(files, adapter, name, target.shape)
    for region in regions:
        _check_stored(files, adapter, region.name, region.shape)
        whole = HeldBlock((0,) * len(region.shape), region.shape)
        _check_values(files, adapter, region, whole, target.dtype)
    for region in regions:
        _read_region(files, region, target, local_block(target))


@torch.no_grad()
def read_stored(files: ModelFiles, name: str) -> Tensor:
    """Read the stored weight ``name``: in bfloat16 where it is quantised, else in its own dtype.

    Raises
    ------
    ValueError
        Its dtype or its scales cannot be read.
    """
    if problem := dtype_problem(name, files.tensors):
        raise ValueError(problem)
    stored = files.tensors[name]
    whole = HeldBlock((0,) * len(stored.shape), stored.shape)
    _check_stored_scales(files, name, whole)
    quantised = stored.dtype in (FP8_DTYPE, MXFP4_DTYPE)
    target = torch.empty(stored.shape, dtype=torch.bfloat16 if quantised else getattr(torch, stored.dtype))
    if target.numel():
        _fill(target, files, name, whole)
    return target


def _regions(files: ModelFiles, adapter: HfAdapter, name: str, shape: tuple[int, ...]) -> list[Region]:
    """Return `HfAdapter.regions` by the files' names: a tied tensor may be stored under the head's name only."""
    return [
        region if adapter.tied_twin(region.name) is None else region._replace(name=tied_name(files.tensors))
        for region in adapter.regions(name, shape)
    ]


def _read_region(files: ModelFiles, region: Region, local: Tensor, block: HeldBlock) -> None:
    part = overlap(block, region.low, region.shape)
    if not part.is_empty:
        _fill(_view(local, block, region, part), files, region.name, part)


def _check(files: ModelFiles, regions: list[Region], adapter: HfAdapter) -> None:
    expected = {region.name: region.shape for region in regions}
    if lost := [name for name in expected if name not in files.tensors]:
        key = config_key(adapter.arch, lost[0])
        raise ValueError(f"{len(lost)} tensors are missing, the first is {lost[0]!r}{key}")
    for name, shape in expected.items():
        _check_stored(files, adapter, name, shape)
    for name, stored in files.tensors.items():
        own = quantised_weight(name, files.tensors)
        twin = adapter.tied_twin(name)
        if twin in expected:
            _check_stored(files, adapter, name, expected[twin])
        left_out = adapter.is_redundant(name) or adapter.is_mtp(name) or twin in expected
        of_quantised = own is not None and (own in expected or adapter.tied_twin(own) in expected)
        if name not in expected and not of_quantised and not left_out:
            key = config_key(adapter.arch, name)
            raise ValueError(f"tensor {name!r} of {stored.file.name} is not part of this model{key}")


def _check_stored(files: ModelFiles, adapter: HfAdapter, name: str, shape: tuple[int, ...]) -> None:
    """Check what the head of a file contains about a tensor (ValueError)."""
    stored = files.tensors.get(name)
    if stored is None:
        raise ValueError(f"tensor {name!r} is missing{config_key(adapter.arch, name)}")
    if stored.shape != shape:
        key = config_key(adapter.arch, name)
        raise ValueError(f"tensor {name!r} has shape {stored.shape}, not {shape}{key}")
    if problem := dtype_problem(name, files.tensors):
        raise ValueError(problem)


def _check_values(files: ModelFiles, adapter: HfAdapter, region: Region, part: HeldBlock, dtype: torch.dtype) -> None:
    """Check the scales of what will be read, and a second copy of it (ValueError)."""
    _check_stored_scales(files, region.name, part)
    twin = adapter.tied_twin(region.name)
    if twin is None or twin not in files.tensors:
        return
    for rows in _portions(part, math.prod(region.shape[1:]) * 4):
        if not torch.equal(_read(files, region.name, rows).to(dtype), _read(files, twin, rows).to(dtype)):
            raise ValueError(heads_differ_problem())


def _check_stored_scales(files: ModelFiles, name: str, part: HeldBlock) -> None:
    if files.tensors[name].dtype == FP8_DTYPE:
        _check_scales(files, name, part)
    if files.tensors[name].dtype == MXFP4_DTYPE:
        check_mxfp4_scales(files, name, part)


def _check_scales(files: ModelFiles, name: str, part: HeldBlock) -> None:
    low, high = _blocks(part)
    scales = _read(files, name + SCALE_SUFFIX, HeldBlock(low, high)).float()
    good = scales.isfinite() & (scales >= 0)
    if not bool(good.all()):
        bad = float(scales[~good][0])
        raise ValueError(f"tensor {name + SCALE_SUFFIX!r} has the scale {bad}: scales are positive numbers")
    for row, column in (scales == 0).nonzero().tolist():
        # a block of zeros has no proper scale: some converters write 0
        first = ((low[0] + row) * BLOCK, (low[1] + column) * BLOCK)
        last = tuple(min(begin + BLOCK, size) for begin, size in zip(first, files.tensors[name].shape, strict=True))
        values = _stored_numbers(files, name, HeldBlock(first, last))
        if bool((values.float() != 0).any()):
            raise ValueError(f"tensor {name + SCALE_SUFFIX!r} has the scale 0 for a block that is not zero")


def _beside(files: ModelFiles) -> str:
    """Report in an error which files were not read: the tensors may be there."""
    return f"(not read, because outside of the model: {', '.join(files.ignored[:3])})" if files.ignored else ""


def _view(local: Tensor, block: HeldBlock, region: Region, part: HeldBlock) -> Tensor:
    """Return the elements of ``local`` that hold ``part`` of the region, with the region's dimensions."""
    leading = len(region.low) - len(region.shape)
    view = local[tuple(region.low[i] - block.low[i] for i in range(leading))]
    for dim, (low, high) in enumerate(zip(part.low, part.high, strict=True)):
        view = view.narrow(dim, region.low[leading + dim] + low - block.low[leading + dim], high - low)
    return view


def _fill(target: Tensor, files: ModelFiles, name: str, part: HeldBlock) -> None:
    """Read ``part`` of a tensor into ``target``, some rows at a time."""
    if not target.dim():
        target.copy_(_read(files, name, part).view(()))
        return
    for rows in _portions(part, target[0].numel() * 4):
        target[rows.low[0] - part.low[0] : rows.high[0] - part.low[0]].copy_(_read(files, name, rows))


def _portions(part: HeldBlock, row_bytes: int) -> Iterator[HeldBlock]:
    """Yield ``part`` in portions of several rows."""
    step = max(1, _PORTION_BYTES // max(1, row_bytes))
    for begin in range(part.low[0], part.high[0], step):
        yield HeldBlock((begin, *part.low[1:]), (min(begin + step, part.high[0]), *part.high[1:]))


def _read(files: ModelFiles, name: str, part: HeldBlock) -> Tensor:
    if files.tensors[name].dtype == MXFP4_DTYPE:
        return read_mxfp4(files, name, part)
    numbers = _stored_numbers(files, name, part)
    if files.tensors[name].dtype != FP8_DTYPE:
        return numbers
    scales = _read(files, name + SCALE_SUFFIX, HeldBlock(*_blocks(part)))
    return dequantise(numbers, scales.float(), part.low)


def _stored_numbers(files: ModelFiles, name: str, part: HeldBlock) -> Tensor:
    """Return the numbers as they are stored, without their scales."""
    shape = tuple(high - low for low, high in zip(part.low, part.high, strict=True))
    return torch.frombuffer(files.read(name, *part), dtype=getattr(torch, files.tensors[name].dtype)).view(shape)


def _blocks(part: HeldBlock) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return first and last blocks of scales that ``part`` of a matrix touches."""
    return tuple(i // BLOCK for i in part.low), tuple(-(-i // BLOCK) for i in part.high)
