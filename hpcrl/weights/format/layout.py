"""Where every byte of a published model lies, and which rank writes it: pure functions, equal on all ranks.

Ranks write into shared files at offsets that follow from names, shapes and dtypes alone, so nothing is gathered
and one rank or many give the same bytes. Each file is cut into **units** of whole hash chunks that begin and end
on pages, and each unit has exactly one writer: two NFS clients that write into one page may overwrite each other,
parallel filesystems lock by page or stripe, and direct I/O needs whole blocks. A writer that lacks bytes of its
unit gets them from the rank that has them; there are few, where a rank's rows end.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from hpcrl.weights.format.manifest import CHUNK_BYTES
from hpcrl.weights.format.shard import safetensors_header, tensor_size

__all__ = [
    "PAGE_BYTES",
    "Part",
    "PublishedTensor",
    "Run",
    "ShardLayout",
    "Unit",
    "assign_units",
    "block_runs",
    "layout_shards",
]

PAGE_BYTES = 4096


class PublishedTensor(NamedTuple):
    """A tensor to publish; ``dtype`` is torch's name."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return tensor_size(self.name, self.dtype, self.shape)


class Run(NamedTuple):
    """Bytes ``start`` to ``start + bytes`` of a tensor that ``rank`` has."""

    rank: int
    start: int
    bytes: int


class Part(NamedTuple):
    """A stretch of a unit that comes from one rank.

    Attributes
    ----------
    rank:
        That has it.
    tensor:
        Name.
    start:
        First byte in the tensor.
    bytes:
        Length.
    at:
        First byte from the start of the unit.
    """

    rank: int
    tensor: str
    start: int
    bytes: int
    at: int


class Unit(NamedTuple):
    """A stretch of a file with one writer: whole hash chunks, beginning and ending on pages (or the file's end)."""

    file: str
    offset: int
    bytes: int
    writer: int
    parts: tuple[Part, ...]


class ShardLayout(NamedTuple):
    """One safetensors file: its head, and its tensors with their offsets from the start of the file."""

    file: str
    head: bytes
    tensors: tuple[tuple[PublishedTensor, int], ...]
    bytes: int


def layout_shards(tensors: Iterable[PublishedTensor], max_shard_bytes: int) -> list[ShardLayout]:
    """Deal tensors out to shard files.

    Tensors keep their order, a shard is full before it would exceed ``max_shard_bytes`` (a tensor larger than
    that has a shard of its own), and inside a shard tensors of whole pages come first, so that they all begin
    on a page and the others share few.

    Raises
    ------
    ValueError
        A dtype is unknown, a name comes twice, or there are no tensors.
    """
    groups: list[list[PublishedTensor]] = []
    names: set[str] = set()
    filled = 0
    for tensor in tensors:
        if tensor.name in names:
            raise ValueError(f"tensor {tensor.name!r} comes twice")
        names.add(tensor.name)
        if not groups or filled + tensor.bytes > max_shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += tensor.bytes
    if not groups:
        raise ValueError("there are no tensors to publish")
    return [
        _layout(f"model-{number:05d}-of-{len(groups):05d}.safetensors", group)
        for number, group in enumerate(groups, start=1)
    ]


def _layout(file: str, tensors: list[PublishedTensor]) -> ShardLayout:
    ordered = sorted(tensors, key=lambda tensor: tensor.bytes % PAGE_BYTES != 0)  # stable
    head = safetensors_header(ordered, align=PAGE_BYTES)
    placed = []
    offset = len(head)
    for tensor in ordered:
        placed.append((tensor, offset))
        offset += tensor.bytes
    return ShardLayout(file, head, tuple(placed), offset)


def assign_units(
    shard: ShardLayout, runs: Mapping[str, Sequence[Run]], world_size: int, *, chunk_bytes: int = CHUNK_BYTES
) -> list[Unit]:
    """Cut a shard (without its head) into units and give each to the rank that has most of it.

    Ranks that have equally much take turns.

    Parameters
    ----------
    shard:
        From `layout_shards`.
    runs:
        For each tensor, which rank has which bytes: in order, each byte once.
    world_size:
        Number of ranks.
    chunk_bytes:
        Size of hash chunks, a multiple of `PAGE_BYTES`.

    Raises
    ------
    ValueError
        The runs of a tensor leave bytes out or have some twice.
    """
    if chunk_bytes % PAGE_BYTES:
        raise ValueError(f"chunk_bytes must be a multiple of {PAGE_BYTES}, it is {chunk_bytes}")
    units: list[Unit] = []
    parts: list[Part] = []
    begin = position = len(shard.head)
    turn = 0
    for tensor, offset in shard.tensors:
        _check_runs(tensor, runs[tensor.name])
        queue = iter(runs[tensor.name])
        run = next(queue, None)
        for start in range(0, tensor.bytes, chunk_bytes):
            end = min(start + chunk_bytes, tensor.bytes)
            while run is not None and run.start < end:
                first, last = max(run.start, start), min(run.start + run.bytes, end)
                if last > first:
                    parts.append(Part(run.rank, tensor.name, first, last - first, offset + first - begin))
                if run.start + run.bytes > end:
                    break
                run = next(queue, None)
            position = offset + end
            if position % PAGE_BYTES == 0:
                units.append(_unit(shard.file, begin, position, parts, turn=turn, world_size=world_size))
                begin, parts, turn = position, [], turn + 1
    if position > begin:
        units.append(_unit(shard.file, begin, position, parts, turn=turn, world_size=world_size))
    return units


def _unit(file: str, begin: int, end: int, parts: list[Part], *, turn: int, world_size: int) -> Unit:
    held: dict[int, int] = {}
    for part in parts:
        held[part.rank] = held.get(part.rank, 0) + part.bytes
    most = max(held.values())
    # ranks that have equally much take turns
    writer = min((rank for rank, size in held.items() if size == most), key=lambda rank: (rank - turn) % world_size)
    return Unit(file, begin, end - begin, writer, tuple(parts))


def _check_runs(tensor: PublishedTensor, runs: Sequence[Run]) -> None:
    position = 0
    for run in runs:
        if run.start != position or run.bytes < 0:
            raise ValueError(f"the ranks' parts of tensor {tensor.name!r} do not fit together at byte {position}")
        position += run.bytes
    if position != tensor.bytes:
        raise ValueError(f"the ranks have {position} bytes of tensor {tensor.name!r}, it has {tensor.bytes}")


def block_runs(shape: Sequence[int], low: Sequence[int], high: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Where the block ``low <= index < high`` of a tensor lies: (first element, number), ascending.

    The elements of the block in C order are those of the runs one behind the other.
    """
    if any(end <= begin for begin, end in zip(low, high, strict=True)):
        return
    # trailing dimensions that the block has whole, and one more, are one stretch
    split = len(shape)
    while split > 0 and (low[split - 1], high[split - 1]) == (0, shape[split - 1]):
        split -= 1
    inner = math.prod(shape[split:])
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    if split == 0:
        yield 0, inner
        return
    first, length = low[split - 1] * inner, (high[split - 1] - low[split - 1]) * inner
    for index in itertools.product(*(range(low[i], high[i]) for i in range(split - 1))):
        yield first + sum(i * stride for i, stride in zip(index, strides, strict=False)), length
