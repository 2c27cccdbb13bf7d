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
from typing import NamedTuple, Self

from hpcrl.errors import UsageError
from hpcrl.weights.format.dtypes import SAFETENSORS_DTYPES
from hpcrl.weights.format.layout import block_runs

__all__ = ["INDEX", "ModelFiles", "StoredBlock"]

_DTYPES = {theirs: (ours, size) for ours, (theirs, size) in SAFETENSORS_DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors project."""
_SPAN_BYTES = 4 << 20
INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"
_STRANGERS = ("consolidated", "adapter_model")
"""Beginnings of names of files that hold the same model in other names, or what is added to it."""
_GAP_BYTES = 64 << 10
"""Runs that lie nearer than this to each other are read together."""


class StoredBlock(NamedTuple):
    """Where a tensor lies: file, first byte in it, dtype by torch's name and bytes of an element, shape."""

    file: Path
    offset: int
    dtype: str
    width: int
    shape: tuple[int, ...]


class ModelFiles:
    """The safetensors files of a directory. A context manager: files stay open in it."""

    def __init__(self, model_dir: Path) -> None:
        """Read the heads of all files.

        Raises
        ------
        UsageError
            There are none, one is no safetensors file, ends before its tensors do, or is a link to what is not there,
            or they are not those of the index (the message names it).
        """
        index = _indexed(model_dir)
        paths = _files(model_dir, index)
        self.model_dir = model_dir
        self.tensors: dict[str, StoredBlock] = {}
        self._open: dict[Path, int] = {}
        for path in paths:
            for name, block in _head(path).items():
                if name in self.tensors:
                    raise UsageError(f"{path} has tensor {name!r}, and so has {self.tensors[name].file}")
                if index is not None and index.get(name, path.name) != path.name:
                    raise UsageError(f"{path} has tensor {name!r}, which {model_dir / INDEX} says is in {index[name]}")
                self.tensors[name] = block
        if index is not None and (lost := index.keys() - self.tensors.keys()):
            raise UsageError(f"{model_dir / INDEX} names tensor {min(lost)!r}, which {index[min(lost)]} has not")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def read(self, name: str, low: Sequence[int], high: Sequence[int]) -> bytearray:
        """The bytes of the block ``low <= index < high`` of a tensor, in C order.

        Raises
        ------
        UsageError
            The file ends before the tensor does.
        OSError
            The filesystem refused.
        """
        stored = self.tensors[name]
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


def _indexed(model_dir: Path) -> dict[str, str] | None:
    """The file of each tensor by the index of a directory; None where there is no index."""
    path = model_dir / INDEX
    if not path.is_file():
        return None
    try:
        named = json.loads(path.read_bytes())["weight_map"]
        if not isinstance(named, dict) or not named:
            raise ValueError("weight_map is no object, or empty")
        for name, file in named.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise ValueError(f"the file of {name!r} is {file!r}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"{path} is no index of safetensors files: {type(error).__name__}: {error}") from error
    return named


def _files(model_dir: Path, index: Mapping[str, str] | None) -> list[Path]:
    """The files that hold the model: those of the index, ``model.safetensors``, or all but known strangers."""
    whole = model_dir / _WHOLE
    if index is not None:
        if whole.is_file() and _WHOLE not in index.values():
            # transformers reads the one, vLLM the other
            raise UsageError(f"{model_dir} has {INDEX} and beside it {_WHOLE}, which the index does not name")
        paths = [model_dir / file for file in sorted(set(index.values()))]
        if missing := [path.name for path in paths if not path.is_file()]:
            raise UsageError(f"{model_dir / INDEX} names {missing[0]}, which is not there ({len(missing)} such files)")
        return paths
    if whole.is_file():
        return [whole]
    paths = [path for path in sorted(model_dir.glob("*.safetensors")) if not path.name.startswith(_STRANGERS)]
    if not paths:
        raise UsageError(f"{model_dir} has no *.safetensors: it is not a model directory")
    return paths


def _head(path: Path) -> dict[str, StoredBlock]:
    if path.is_symlink() and not path.exists():
        raise UsageError(
            f"{path} is a link to {os.readlink(path)}, which is not there: a download was interrupted or removed\n"
            "    hint: download the model again"
        )
    if not path.is_file():
        raise UsageError(f"{path} is no file")
    with path.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        if not 2 <= size <= _MAX_HEADER_BYTES:
            raise UsageError(f"{path} is no safetensors file: its head would have {size} bytes")
        text = stream.read(size)
        length = os.fstat(stream.fileno()).st_size
    try:
        head: Mapping[str, Mapping[str, object]] = json.loads(text)
        blocks = {name: _block(path, 8 + size, entry) for name, entry in head.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"{path} is no safetensors file: {type(error).__name__}: {error}") from error
    ends = {name: block.offset + math.prod(block.shape) * block.width for name, block in blocks.items()}
    if late := [name for name, end in ends.items() if end > length]:
        raise UsageError(
            f"{path} has {length:,} bytes and ends before its tensor {late[0]!r} does: it was not copied whole"
        )
    return blocks


def _block(path: Path, data: int, entry: Mapping[str, object]) -> StoredBlock:
    shape, offsets, theirs = entry["shape"], entry["data_offsets"], str(entry["dtype"])
    if not isinstance(shape, list) or not isinstance(offsets, list):
        raise TypeError("shape or data_offsets is no list")
    dtype, width = _DTYPES.get(theirs, (theirs, 0))
    begin, end = map(int, offsets)
    if not 0 <= begin <= end or any(not isinstance(size, int) or size < 0 for size in shape):
        raise ValueError(f"offsets {begin} to {end} of a tensor of shape {shape}")
    if width and end - begin != math.prod(shape) * width:
        raise ValueError(f"{end - begin} bytes for {shape} of {theirs}")
    return StoredBlock(path, data + begin, dtype, width, tuple(map(int, shape)))
