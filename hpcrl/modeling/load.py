"""Weights of a model directory into a model: each rank reads the bytes of its own shards, and no others."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from hpcrl.modeling.blocks import HeldBlock, local_block, local_part, overlap
from hpcrl.modeling.fp8.quantiser import dequantise
from hpcrl.modeling.hf import HfAdapter, Region, model_tensors
from hpcrl.weights.format.quantize import BLOCK, FP8_DTYPE, scale_tensor
from hpcrl.weights.read.model_files import ModelFiles

__all__ = ["load_model_dir", "read_whole"]

_PORTION_BYTES = 64 << 20
"""Most bytes that are held beside the model."""
_SCALE = "_scale_inv"
_SCALE_DTYPES = ("float32", "bfloat16", "float16")
_WEIGHT_DTYPES = (*_SCALE_DTYPES, FP8_DTYPE)


@torch.no_grad()
def load_model_dir(model: nn.Module, adapter: HfAdapter, model_dir: Path) -> None:
    """Fill ``model``, whole or sharded, on any device. Not collective.

    Values are converted to the dtype of the model's tensors; matrices in FP8 are multiplied with their block scales.
    Tensors of multi-token prediction that the model does not carry (`hpcrl.modeling.carried`) are left out.
    Memory beside the model: some 64 MiB, or a row of a tensor in float32 where that is larger.

    Raises
    ------
    UsageError
        The directory has no whole safetensors files.
    ValueError
        They are not of this model (the message names directory and tensor): a tensor is missing, unknown or of
        another shape, or its dtype cannot be read. Nothing was written then.
    """
    with ModelFiles(model_dir) as files:
        find_tied(files, adapter)
        tensors = model_tensors(model)
        wanted = [(name, region) for name, own in tensors.items() for region in adapter.regions(name, own.shape)]
        try:
            _check(files, [region for _, region in wanted], adapter)
        except ValueError as error:
            raise ValueError(f"{model_dir}: {error}") from error
        blocks = {name: local_block(own) for name, own in tensors.items()}
        locals_ = {name: local_part(own) for name, own in tensors.items()}
        for name, region in wanted:
            _read_region(files, region, locals_[name], blocks[name])


@torch.no_grad()
def read_whole(files: ModelFiles, adapter: HfAdapter, name: str, target: Tensor) -> None:
    """Fill ``target``, our tensor ``name`` in its shape and any dtype, from files that `load_model_dir` would take.

    Files that it would refuse are not looked for: their errors are anything.
    """
    find_tied(files, adapter)
    for region in adapter.regions(name, target.shape):
        _read_region(files, region, target, local_block(target))


def find_tied(files: ModelFiles, adapter: HfAdapter) -> None:
    """Find the embedding of a tied model under the name of the head, where files have it under that name alone.

    So ``safetensors.torch.save_model`` stores a model whose two parameters are one.
    """
    naming = adapter.arch.facts.naming
    if adapter.arch.tie_word_embeddings and naming.embedding not in files.tensors and naming.lm_head in files.tensors:
        files.tensors[naming.embedding] = files.tensors.pop(naming.lm_head)


def _read_region(files: ModelFiles, region: Region, local: Tensor, block: HeldBlock) -> None:
    part = overlap(block, region.low, region.shape)
    if not part.is_empty:
        _fill(_view(local, block, region, part), files, region.name, part)


def _check(files: ModelFiles, regions: list[Region], adapter: HfAdapter) -> None:
    expected = {region.name: region.shape for region in regions}
    for name, shape in expected.items():
        stored = files.tensors.get(name)
        if stored is None:
            missing = sum(other not in files.tensors for other in expected)
            raise ValueError(f"{missing} tensors are missing, the first is {name!r}")
        if stored.shape != shape:
            raise ValueError(f"tensor {name!r} has shape {stored.shape}, not {shape}")
        if stored.dtype not in _WEIGHT_DTYPES:
            raise ValueError(f"tensor {name!r} has dtype {stored.dtype}, which cannot be read")
        if stored.dtype == FP8_DTYPE:
            _check_scales(files, name, shape)
    for name, stored in files.tensors.items():
        own = name.removesuffix(_SCALE)
        of_quantised = own != name and own in expected and files.tensors[own].dtype == FP8_DTYPE
        left_out = adapter.is_redundant(name) or adapter.is_mtp(name)
        if name not in expected and not of_quantised and not left_out:
            raise ValueError(f"tensor {name!r} of {stored.file.name} is not part of this model")
    _check_tied_head(files, adapter)


def _check_tied_head(files: ModelFiles, adapter: HfAdapter) -> None:
    """Refuse a stored head that differs from the embedding which the config says it is."""
    naming = adapter.arch.facts.naming
    head, embedding = files.tensors.get(naming.lm_head), files.tensors.get(naming.embedding)
    if not adapter.arch.tie_word_embeddings or head is None or embedding is None:
        return
    same = head.shape == embedding.shape and head.dtype in _SCALE_DTYPES
    step = max(1, _PORTION_BYTES // (4 * max(1, embedding.shape[-1])))
    for begin in range(0, embedding.shape[0], step) if same else ():
        rows = HeldBlock((begin, 0), (min(begin + step, embedding.shape[0]), embedding.shape[1]))
        ours, theirs = (_read(files, name, rows).float() for name in (naming.embedding, naming.lm_head))
        if not (same := torch.equal(ours, theirs)):
            break
    if not same:
        raise ValueError(
            f"tie_word_embeddings is true, but tensors {naming.lm_head!r} and {naming.embedding!r} differ; set "
            "tie_word_embeddings: false in config.json where the head was trained apart, or remove the stored head"
        )


def _check_scales(files: ModelFiles, name: str, shape: tuple[int, ...]) -> None:
    if len(shape) != 2:
        raise ValueError(f"tensor {name!r} is in FP8 and no matrix: the layout of its scales is not known")
    wanted = scale_tensor(name, shape)
    stored = files.tensors.get(wanted.name)
    if stored is None:
        raise ValueError(f"tensor {name!r} is in FP8, but its scales, {wanted.name!r}, are missing")
    if stored.dtype not in _SCALE_DTYPES:
        known = ", ".join(_SCALE_DTYPES)
        raise ValueError(f"tensor {wanted.name!r} has dtype {stored.dtype}; scales of FP8 are read in {known}")
    if stored.shape != wanted.shape:
        raise ValueError(
            f"tensor {wanted.name!r} has shape {stored.shape}, not {wanted.shape}: blocks are {BLOCK} wide"
        )


def _view(local: Tensor, block: HeldBlock, region: Region, part: HeldBlock) -> Tensor:
    """The elements of ``local`` that hold ``part`` of the region, with the region's dimensions."""
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
    row = max(1, target[0].numel()) * 4
    step = max(1, _PORTION_BYTES // row)
    for begin in range(part.low[0], part.high[0], step):
        end = min(begin + step, part.high[0])
        rows = HeldBlock((begin, *part.low[1:]), (end, *part.high[1:]))
        target[begin - part.low[0] : end - part.low[0]].copy_(_read(files, name, rows))


def _read(files: ModelFiles, name: str, part: HeldBlock) -> Tensor:
    stored = files.tensors[name]
    shape = tuple(high - low for low, high in zip(part.low, part.high, strict=True))
    data = torch.frombuffer(files.read(name, *part), dtype=getattr(torch, stored.dtype)).view(shape)
    if stored.dtype != FP8_DTYPE:
        return data
    low = tuple(i // BLOCK for i in part.low)
    high = tuple(-(-i // BLOCK) for i in part.high)
    return dequantise(data, _read(files, name + _SCALE, HeldBlock(low, high)).float(), part.low)
