"""Assignment of file ranges to writing ranks, for all files at once (numpy: a large model has 350,000 ranges).

Ranks write into shared files at offsets that follow from names, shapes and dtypes alone, so nothing is gathered
and one rank or many give the same bytes. Each file is cut into **units** of whole hash chunks that begin and end
on pages, and each unit has exactly one writer: two NFS clients that write into one page may overwrite each other,
parallel filesystems lock by page or stripe, and direct I/O needs whole blocks. A writer that lacks bytes of its
unit gets them from the rank that has them; there are few such bytes, where a rank's rows end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpcrl.weights.format.layout import PAGE_BYTES, PublishedTensor, ShardLayout
from hpcrl.weights.format.manifest import CHUNK_BYTES

Ints = NDArray[np.int64]


class Runs(NamedTuple):
    """Bytes ``start`` to ``start + bytes`` of tensors that ranks have, in any order; each byte of a tensor once.

    Attributes
    ----------
    tensor:
        ``[runs]`` the number of the tensor.
    rank, start, bytes:
        ``[runs]``.
    """

    tensor: Ints
    rank: Ints
    start: Ints
    bytes: Ints


class Units(NamedTuple):
    """Stretches of files with one writer each, file after file: whole hash chunks, beginning and ending on pages.

    The last of a file ends where the file ends.

    Attributes
    ----------
    file:
        ``[units]`` the number of the file.
    offset, bytes:
        ``[units]`` where it lies in the file.
    writer:
        ``[units]`` a rank.
    """

    file: Ints
    offset: Ints
    bytes: Ints
    writer: Ints


class HashChunks(NamedTuple):
    """Hash chunks in the order of the files: of which unit and tensor, the number in the tensor, the length."""

    unit: Ints
    tensor: Ints
    number: Ints
    bytes: Ints


class Parts(NamedTuple):
    """Stretches of units that come from one rank each, in the order of the files.

    Attributes
    ----------
    unit, rank, tensor:
        ``[parts]``.
    start, bytes:
        ``[parts]`` where it lies in the tensor.
    at:
        ``[parts]`` first byte from the start of the unit.
    """

    unit: Ints
    rank: Ints
    tensor: Ints
    start: Ints
    bytes: Ints
    at: Ints


class UnitTable(NamedTuple):
    """Result of `assign_units`."""

    units: Units
    chunks: HashChunks
    parts: Parts


def assign_units(
    shards: Sequence[ShardLayout],
    number_of: Mapping[str, int],
    runs: Runs,
    world_size: int,
    *,
    chunk_bytes: int = CHUNK_BYTES,
) -> UnitTable:
    """Cut files (without their heads) into units and give each to the rank that has most of it.

    Ranks that have equally much take turns.

    Parameters
    ----------
    shards:
        From `hpcrl.weights.format.layout.layout_shards`.
    number_of:
        The number of each tensor, by name; also of tensors that these files do not have.
    runs:
        Runs of bytes that each rank has.
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
    tensors = [tensor for shard in shards for tensor, _ in shard.tensors]
    number = np.array([number_of[tensor.name] for tensor in tensors], np.int64)
    offset = np.array([offset for shard in shards for _, offset in shard.tensors], np.int64)
    # a tensor ends where the next one begins, or the file ends
    last = np.cumsum([len(shard.tensors) for shard in shards]) - 1
    size = np.empty_like(offset)
    size[:-1] = np.diff(offset)
    size[last] = np.array([shard.bytes for shard in shards]) - offset[last]
    file = np.repeat(np.arange(len(shards)), [len(shard.tensors) for shard in shards])
    # all tensors concatenated, as if the files had no heads
    base = np.cumsum(size) - size
    place = np.full(max(number_of.values()) + 1, -1, np.int64)
    place[number] = np.arange(len(number))

    count = -(-size // chunk_bytes)
    of = np.repeat(np.arange(len(size)), count)
    nth = np.arange(len(of)) - np.repeat(np.cumsum(count) - count, count)
    chunk_size = np.minimum(chunk_bytes, size[of] - nth * chunk_bytes)
    chunk_offset = offset[of] + nth * chunk_bytes
    chunk_file = file[of]
    # a unit begins with a file, or after a chunk that ends on a page
    begins = np.ones(len(of), bool)
    begins[1:] = ((chunk_offset + chunk_size)[:-1] % PAGE_BYTES == 0) | (chunk_file[1:] != chunk_file[:-1])
    unit = np.cumsum(begins) - 1
    first = np.flatnonzero(begins)
    unit_file, unit_bytes = chunk_file[first], np.add.reduceat(chunk_size, first) if len(first) else chunk_size
    unit_base = base[of[first]] + nth[first] * chunk_bytes

    rank, run_begin = _placed_runs(runs, place, base, size, tensors)
    chunk_begin = base[of] + nth * chunk_bytes
    begin = np.sort(np.concatenate((run_begin, chunk_begin)), kind="stable")
    begin = begin[np.diff(begin, prepend=-1) != 0]
    part_bytes = np.diff(begin, append=size.sum())
    chunk = np.searchsorted(chunk_begin, begin, side="right") - 1
    part_rank = rank[np.searchsorted(run_begin, begin, side="right") - 1]
    part_unit, part_of = unit[chunk], of[chunk]
    turn = np.arange(len(first)) - np.searchsorted(unit_file, unit_file)
    return UnitTable(
        Units(unit_file, chunk_offset[first], unit_bytes, _writers(part_unit, part_rank, part_bytes, turn, world_size)),
        HashChunks(unit, number[of], nth, chunk_size),
        Parts(part_unit, part_rank, number[part_of], begin - base[part_of], part_bytes, begin - unit_base[part_unit]),
    )


def _placed_runs(
    runs: Runs, place: Ints, base: Ints, size: Ints, tensors: Sequence[PublishedTensor]
) -> tuple[Ints, Ints]:
    """Rank and first byte (with all tensors one behind the other) of the runs of these tensors, in order."""
    tensor = place[runs.tensor]
    # runs of tensors in other files, and empty ones
    kept = np.flatnonzero((tensor >= 0) & (runs.bytes != 0))
    begin = base[tensor[kept]] + runs.start[kept]
    order = np.argsort(begin, kind="stable")
    kept, begin = kept[order], begin[order]
    tensor, end = tensor[kept], begin + runs.bytes[kept]
    # each run begins where the one before ends, and none leaves its tensor
    expected = np.concatenate(([0], end[:-1])) if len(end) else end
    outside = (runs.start[kept] < 0) | (runs.bytes[kept] < 0) | (end > base[tensor] + size[tensor])
    wrong = np.flatnonzero((begin != expected) | outside)
    reached = int(end[-1]) if len(end) else 0
    if len(wrong):
        reached = int(min(begin[wrong[0]], expected[wrong[0]]))
    if len(wrong) or reached != size.sum():
        at = int(np.searchsorted(base, reached, side="right")) - 1
        raise ValueError(
            f"the ranks' parts of tensor {tensors[at].name!r} do not fit together at byte {reached - int(base[at])}"
        )
    return runs.rank[kept], begin


def _writers(unit: Ints, rank: Ints, size: Ints, turn: Ints, world_size: int) -> Ints:
    """Return the rank that has most of each unit."""
    pair = unit * world_size + rank
    order = np.argsort(pair, kind="stable")
    pair = pair[order]
    first = np.flatnonzero(np.diff(pair, prepend=-1))
    held = np.add.reduceat(size[order], first) if len(first) else size
    pair = pair[first]
    unit, rank = pair // world_size, pair % world_size
    order = np.lexsort(((rank - turn[unit]) % world_size, -held, unit))
    first = np.searchsorted(unit[order], np.arange(len(turn)))
    writer: Ints = rank[order][first]
    return writer
