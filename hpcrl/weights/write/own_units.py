"""Units of one writer: hashing and writing the bytes that it has in memory, or encoding their changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash

from hpcrl.weights.format.layout import ShardLayout
from hpcrl.weights.format.manifest import Chunk, Piece, TensorRecord
from hpcrl.weights.write.handoff_writer import ShardResult
from hpcrl.weights.write.writer import FileWriter, shard_records, write_stream

Digests = dict[str, list[Chunk]]
"""Hashed chunks by file, as each writer reports them."""


class UnitChunk(NamedTuple):
    """Hash chunk of a unit: its tensor, its number there, its length, and bytes of an element."""

    tensor: str
    number: int
    bytes: int
    width: int


class OwnUnit(NamedTuple):
    """Unit that this rank writes: its place in the file, its place in the image, and its chunks."""

    file: str
    offset: int
    at: int
    bytes: int
    cuts: tuple[UnitChunk, ...]


def write_units(writer: FileWriter, units: Sequence[OwnUnit], image: memoryview, turn: int) -> Digests:
    """Write units from an image, and hash their chunks.

    Parameters
    ----------
    image:
        Bytes of this rank's units, each at its ``at``.
    turn:
        With which unit to begin: ranks give different ones, so that they do not all write the same file first.

    Raises
    ------
    OSError
        The filesystem refused (no space, a quota, a stale handle).
    """
    digests: Digests = {}
    begin = turn % max(1, len(units))
    for unit in (*units[begin:], *units[:begin]):
        data = image[unit.at : unit.at + unit.bytes]
        chunks = writer.write(unit.file, unit.offset, data, [cut.bytes for cut in unit.cuts])
        digests.setdefault(unit.file, []).extend(chunks)
    return digests


def hash_units(units: Sequence[OwnUnit], image: memoryview) -> Digests:
    """Hash the chunks of units in an image, as `write_units` does; nothing is written."""
    digests: Digests = {}
    for unit in units:
        position, found = unit.at, digests.setdefault(unit.file, [])
        for cut in unit.cuts:
            digest = xxhash.xxh3_128_hexdigest(image[position : position + cut.bytes])
            found.append(Chunk(unit.offset + position - unit.at, cut.bytes, digest))
            position += cut.bytes
    return digests


def hashes_by_offset(reports: Sequence[Digests]) -> dict[tuple[str, int], str]:
    """Return the hash of each chunk of all writers, by file and offset."""
    hashes: dict[tuple[str, int], str] = {}
    for report in reports:
        for file, chunks in report.items():
            hashes.update(((file, chunk.offset), chunk.xxh3_128) for chunk in chunks)
    return hashes


def full_results(shards: Sequence[ShardLayout], reports: Sequence[Digests], chunk_bytes: int) -> list[ShardResult]:
    """Return the records of all shards from the reports of the writers, one report a rank.

    Raises
    ------
    KeyError
        A chunk is in no report: a rank did not write its units.
    """
    by_file: dict[str, dict[int, str]] = {shard.file: {} for shard in shards}
    for report in reports:
        for file, chunks in report.items():
            by_file[file].update((chunk.offset, chunk.xxh3_128) for chunk in chunks)
    return [ShardResult(shard.file, *shard_records(shard, by_file[shard.file], chunk_bytes)) for shard in shards]


class Delta(NamedTuple):
    """Part of a delta that this rank computes.

    Attributes
    ----------
    records:
        Encoded changes of single chunks, with their tensor.
    bytes:
        Length of all records.
    digests:
        Hashed chunks of the new content, changed or not.
    """

    records: list[tuple[str, bytes]]
    bytes: int
    digests: Digests


def encode_delta(units: Sequence[OwnUnit], old: memoryview, new: memoryview, *, limit: int) -> Delta | None:
    """Compare two images of the same units. None as soon as the changes exceed ``limit`` bytes.

    Parameters
    ----------
    old, new:
        Images of equal layout, of the version that the delta builds on and of the new one.
    limit:
        Bytes of this rank's records; a delta that is larger is not worth it.
    """
    from hpcrl.weights.format.delta import encode_chunk  # noqa: PLC0415 - numpy, which login nodes do not need

    records: list[tuple[str, bytes]] = []
    digests: Digests = {}
    size = 0
    for unit in units:
        position = unit.at
        for cut in unit.cuts:
            before, after = (image[position : position + cut.bytes] for image in (old, new))
            offset = unit.offset + position - unit.at
            digests.setdefault(unit.file, []).append(Chunk(offset, cut.bytes, xxhash.xxh3_128_hexdigest(after)))
            position += cut.bytes
            if record := encode_chunk(cut.number, before, after, cut.width):
                records.append((cut.tensor, record))
                size += len(record)
                if size > limit:
                    return None
    return Delta(records, size, digests)


def delta_result(directory: Path, name: str, delta: Delta, chunk_bytes: int) -> ShardResult:
    """Write this rank's changes as the file ``name`` and fsync it.

    Returns
    -------
    ShardResult
        The file, and where in it each tensor's changes lie; changes of one tensor are neighbours.
    """
    changes: dict[str, list[Piece]] = {}

    def blocks() -> Iterator[bytes]:
        position = 0
        last = None
        for tensor, record in delta.records:
            pieces = changes.setdefault(tensor, [])
            if tensor == last:
                pieces[-1] = Piece(name, pieces[-1].offset, pieces[-1].bytes + len(record))
            else:
                pieces.append(Piece(name, position, len(record)))
            position, last = position + len(record), tensor
            yield record

    file = write_stream(directory / name, blocks(), chunk_bytes)
    return ShardResult(name, file, {}, {tensor: tuple(pieces) for tensor, pieces in changes.items()})


def delta_tensors(
    shards: Sequence[ShardLayout], reports: Sequence[Digests], chunk_bytes: int
) -> dict[str, TensorRecord]:
    """Return the records of all tensors of a delta's version, changed or not, with hashes but without a file.

    ``file`` is empty.
    """
    return {
        name: msgspec.structs.replace(record, file="", offset=0)
        for result in full_results(shards, reports, chunk_bytes)
        for name, record in result.tensors.items()
    }
