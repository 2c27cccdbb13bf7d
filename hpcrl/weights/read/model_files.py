"""Blocks of the tensors of a Hugging Face model directory, read by the byte.

A rank that holds a part of a tensor reads that part and nothing else, into memory of its own: what is mapped instead
would count against the process for as long as the kernel likes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from hpcrl.errors import UsageError
from hpcrl.weights.format.dtypes import SAFETENSORS_DTYPES
from hpcrl.weights.format.layout import block_runs
from hpcrl.weights.format.mxfp4 import BLOCKS_SUFFIX, MXFP4_DTYPE, unpacked_shape
from hpcrl.weights.read.model_directory import INDEX, find_weight_files
from hpcrl.weights.read.stacked_experts import StackedExpert, stacked_experts, transposed
from hpcrl.weights.read.wrapped_names import STACKED_EXPERTS, language_model_name, text_config

_DTYPES = {theirs: (ours, size) for ours, (theirs, size) in SAFETENSORS_DTYPES.items()}
# powers of two, as scales are published; nothing here writes them
_DTYPES["F8_E8M0"] = ("float8_e8m0fnu", 1)
_THEIRS = {ours: theirs for theirs, (ours, _) in _DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000
"""Maximum header size in bytes, that of the safetensors project."""
_BLOCKS_DIMENSIONS = 4
"""Number of dimensions of ``*_blocks``: experts, outputs, blocks, bytes of a block."""
_SPAN_BYTES = 4 << 20
_GAP_BYTES = 64 << 10
"""Maximum gap in bytes between runs that are read together."""


class StoredBlock(NamedTuple):
    """Location of a tensor: file, first byte in it, dtype by torch's name and bytes of an element, shape.

    A weight in MXFP4 has the file and the first byte of its ``*_blocks``, and no bytes of an element. The matrix of an
    expert that is stored ``stacked`` has those of the tensor of all experts, and its own shape.
    """

    file: Path
    offset: int
    dtype: str
    width: int
    shape: tuple[int, ...]
    stacked: StackedExpert | None = None

    @property
    def nbytes(self) -> int:
        """Return the bytes in the file."""
        return math.prod(self.shape) * self.width


def safetensors_dtype(dtype: str) -> str:
    """Return the name that safetensors has for a dtype of a `StoredBlock`."""
    return _THEIRS.get(dtype, dtype)


class ModelFiles:
    """Safetensors files of a model directory. A context manager: files stay open in it.

    Attributes
    ----------
    tensors:
        Location of each tensor, by its name. A weight that is stored in MXFP4 also has an entry by its own name, in
        dtype and shape of the weight, in addition to its ``*_blocks`` and ``*_scales``. For a vision-language model
        these are the tensors of its language model, by the names of that model's own family.
    ignored:
        Names of files of weights in the directory that are not read (`find_weight_files`).
    """

    def __init__(self, model_dir: Path, *, whole: bool = False) -> None:
        """Read the heads of all files of the model.

        Parameters
        ----------
        whole:
            For a vision-language model, include all tensors, by the names and in the shapes of its files.

        Raises
        ------
        UsageError
            There are none; or one is not a safetensors file, ends before its tensors do, or is a broken link (the
            message names it); or the index does not locate tensors; or a tensor is in two files.
        """
        found = find_weight_files(model_dir)
        self.model_dir = model_dir
        self.ignored = found.ignored
        self.tensors: dict[str, StoredBlock] = {}
        self._open: dict[Path, int] = {}
        for path in found.paths:
            for name, block in _head(path).items():
                if name in self.tensors:
                    raise UsageError(f"{path} has tensor {name!r}, and so has {self.tensors[name].file}")
                self.tensors[name] = block
        for name, path in found.placed.items():
            if name not in self.tensors:
                raise UsageError(f"{path} has no tensor {name!r}, which {INDEX} names in it")
            if self.tensors[name].file != path:
                raise UsageError(f"{self.tensors[name].file} has tensor {name!r}, and by {INDEX} {path} has it")
        wrapped = None if whole else text_config(model_dir)
        if wrapped is not None:
            self.tensors = _language_model(self.tensors, wrapped)
        self.tensors = {**_packed_weights(self.tensors), **self.tensors}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def read(self, name: str, low: Sequence[int], high: Sequence[int]) -> bytearray:
        """Return the bytes of the block ``low <= index < high`` of a stored tensor, in C order.

        Tensors in MXFP4 are not supported as a whole.

        Raises
        ------
        UsageError
            The file ends before the tensor does.
        OSError
            The filesystem refused.
        """
        stored = self.tensors[name]
        if stored.stacked is None:
            return self._read_block(stored, low, high)
        (row, column), (last_row, last_column) = low, high
        block = stored.stacked.block((row, column), (last_row, last_column))
        data = self._read_block(stored._replace(shape=stored.stacked.shape), *block)
        if not stored.stacked.inputs_first:
            return data
        return transposed(data, last_column - column, last_row - row, stored.width)

    def _read_block(self, stored: StoredBlock, low: Sequence[int], high: Sequence[int]) -> bytearray:
        size = math.prod(end - begin for begin, end in zip(low, high, strict=True))
        target = memoryview(result := bytearray(size * stored.width))
        if not size:
            return result
        runs = [(first * stored.width, count * stored.width) for first, count in block_runs(stored.shape, low, high)]
        at = 0
        for begin, end, group in _spans(runs):
            if len(group) == 1:
                self._read_into(stored, begin, target[at : at + end - begin])
                at += end - begin
                continue
            span = memoryview(bytearray(end - begin))
            self._read_into(stored, begin, span)
            for first, count in group:
                target[at : at + count] = span[first - begin : first - begin + count]
                at += count
        return result

    def _read_into(self, stored: StoredBlock, start: int, target: memoryview) -> None:
        descriptor = self._open.get(stored.file)
        if descriptor is None:
            descriptor = self._open[stored.file] = os.open(stored.file, os.O_RDONLY)
        position = 0
        while position < len(target):
            count = os.preadv(descriptor, [target[position:]], stored.offset + start + position)
            if count == 0:
                raise UsageError(f"{stored.file} ends before its tensors do: it was not copied whole")
            position += count


def _language_model(tensors: Mapping[str, StoredBlock], config: Mapping[str, Any]) -> dict[str, StoredBlock]:
    """Return the tensors of a wrapper's language model, by their own names; stacked experts one by one."""
    stacked, hidden_size = config.get("model_type") in STACKED_EXPERTS, config.get("hidden_size", 0)
    found: dict[str, StoredBlock] = {}
    for name, block in tensors.items():
        own = language_model_name(name)
        if own is None:
            continue
        parts = list(stacked_experts(own, block.shape, hidden_size)) if stacked and block.width else []
        own_blocks = {each: block._replace(shape=shape, stacked=place) for each, shape, place in parts} or {own: block}
        if twice := own_blocks.keys() & found.keys():
            raise UsageError(f"{block.file} has {name!r}, and {min(twice)!r} of the language model is there already")
        found |= own_blocks
    return found


def _packed_weights(tensors: Mapping[str, StoredBlock]) -> dict[str, StoredBlock]:
    """Return the weights that are stored in MXFP4, by their own names; whether they are readable is not checked."""
    return {
        name.removesuffix(BLOCKS_SUFFIX): block._replace(dtype=MXFP4_DTYPE, width=0, shape=unpacked_shape(block.shape))
        for name, block in tensors.items()
        if name.endswith(BLOCKS_SUFFIX) and block.dtype == "uint8" and len(block.shape) == _BLOCKS_DIMENSIONS
    }


def _spans(runs: Sequence[tuple[int, int]]) -> list[tuple[int, int, list[tuple[int, int]]]]:
    """Group neighbouring runs (first byte, number) that are read together: begin, end, runs."""
    spans: list[tuple[int, int, list[tuple[int, int]]]] = []
    for first, count in runs:
        if spans:
            begin, end, group = spans[-1]
            if first - end <= _GAP_BYTES and first + count - begin <= _SPAN_BYTES:
                group.append((first, count))
                spans[-1] = (begin, first + count, group)
                continue
        spans.append((first, first + count, [(first, count)]))
    return spans


def _head(path: Path) -> dict[str, StoredBlock]:
    if path.is_symlink() and not path.exists():
        raise UsageError(
            f"{path} is a link to {os.readlink(path)}, which does not exist: a download was interrupted or removed\n"
            "    hint: download the model again"
        )
    if not path.is_file():
        raise UsageError(f"{path} is not a file")
    with path.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        if not 2 <= size <= _MAX_HEADER_BYTES:
            raise UsageError(f"{path} is not a safetensors file: its head would have {size} bytes")
        text = stream.read(size)
        length = os.fstat(stream.fileno()).st_size
    try:
        head: Mapping[str, Mapping[str, object]] = json.loads(text)
        blocks = {name: _block(path, 8 + size, entry) for name, entry in head.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"{path} is not a safetensors file: {type(error).__name__}: {error}") from error
    ends = {name: block.offset + math.prod(block.shape) * block.width for name, block in blocks.items()}
    if late := [name for name, end in ends.items() if end > length]:
        raise UsageError(
            f"{path} has {length:,} bytes and ends before its tensor {late[0]!r} does: it was not copied whole"
        )
    return blocks


def _block(path: Path, data: int, entry: Mapping[str, object]) -> StoredBlock:
    shape, offsets, theirs = entry["shape"], entry["data_offsets"], str(entry["dtype"])
    if not isinstance(shape, list) or not isinstance(offsets, list):
        raise TypeError("shape or data_offsets is not a list")
    dtype, width = _DTYPES.get(theirs, (theirs, 0))
    begin, end = map(int, offsets)
    if not 0 <= begin <= end or any(not isinstance(size, int) or size < 0 for size in shape):
        raise ValueError(f"offsets {begin} to {end} of a tensor of shape {shape}")
    if width and end - begin != math.prod(shape) * width:
        raise ValueError(f"{end - begin} bytes for {shape} of {theirs}")
    return StoredBlock(path, data + begin, dtype, width, tuple(map(int, shape)))
