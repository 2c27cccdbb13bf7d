"""Segments: the unit in which a version is read, shared and served; some tens of MiB, each with its own hashes."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

import msgspec
import xxhash

from hpcrl.weights.format.manifest import Chunk, Manifest, OpenedVersion, TensorRecord

SEGMENT_BYTES = 64 << 20
"""Usual size in bytes; a segment ends with a chunk, and before a tensor that would not fit."""


class Segment(NamedTuple):
    """Range of one file of a version.

    Attributes
    ----------
    file:
        File of the version.
    part:
        Number of the segment in its file, from 0.
    offset, bytes:
        Its range in the file.
    chunks:
        Hashed chunks that it consists of.
    """

    file: str
    part: int
    offset: int
    bytes: int
    chunks: tuple[Chunk, ...]


class SegmentMap:
    """Segments of the data files of one version, and their identity.

    Attributes
    ----------
    key:
        Identifies the version *and its content*: a version that was withdrawn and published again has another key.
    digest:
        Identifies the manifest, and with it the content.
    in_order:
        All segments; the place of each is its `number`.
    """

    def __init__(self, handoff: OpenedVersion, segment_bytes: int = SEGMENT_BYTES) -> None:
        """Cut the files of ``handoff``; nothing is read."""
        self.handoff = handoff
        self.digest = manifest_digest(handoff.manifest)
        self.key = f"{handoff.path.name}-{self.digest[:16]}-{segment_bytes}"
        by_file = handoff.manifest.tensors_by_file()
        data = {*by_file, *(piece.file for pieces in handoff.manifest.changes.values() for piece in pieces)}
        self._segments: dict[str, list[Segment]] = {}
        for file, chunks in handoff.manifest.chunks().items():
            if file not in data:
                continue  # configuration and tokenizer are not read by this way
            ends = {record.offset: record.offset + record.bytes for _, record in by_file.get(file, [])}
            self._segments[file] = _cut(file, chunks, ends, segment_bytes)
        self._offsets = {file: [segment.offset for segment in cut] for file, cut in self._segments.items()}
        self.in_order = [segment for cut in self._segments.values() for segment in cut]
        self._numbers = {(segment.file, segment.part): number for number, segment in enumerate(self.in_order)}

    @property
    def files(self) -> list[str]:
        return list(self._segments)

    def of(self, file: str) -> list[Segment]:
        """Return the segments of a file, in order.

        Raises
        ------
        KeyError
            The version has no such file.
        """
        return self._segments[file]

    def number(self, segment: Segment) -> int:
        """Return the number of a segment in its version, from 0, the same on all nodes."""
        return self._numbers[segment.file, segment.part]

    def number_of(self, file: str, part: int) -> int:
        """Return the number of a segment (see `number`); -1 where it does not exist."""
        return self._numbers.get((file, part), -1)

    def numbers_of(self, record: TensorRecord) -> range:
        """Return the numbers of the segments that contain a tensor of a file of the version."""
        if not record.bytes:
            return range(0)
        first, last = self.at(record.file, record.offset), self.at(record.file, record.offset + record.bytes - 1)
        return range(self.number(first), self.number(last) + 1)

    def at(self, file: str, offset: int) -> Segment:
        """Return the segment that holds byte ``offset`` of ``file``."""
        return self._segments[file][bisect_right(self._offsets[file], offset) - 1]


def manifest_digest(manifest: Manifest) -> str:
    """Return the XXH3-128 of a manifest, equal on all nodes."""
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(manifest))


def _cut(file: str, chunks: list[Chunk], ends: dict[int, int], limit: int) -> list[Segment]:
    """Group chunks; ``ends`` says where the tensor that begins at an offset ends."""
    groups: list[list[Chunk]] = []
    size = 0
    for chunk in chunks:
        # a tensor that fits into a segment is not split
        stretch = min(limit, max(chunk.bytes, ends.get(chunk.offset, 0) - chunk.offset))
        if not groups or size + stretch > limit:
            groups.append([])
            size = 0
        groups[-1].append(chunk)
        size += chunk.bytes
    return [
        Segment(file, index, group[0].offset, sum(chunk.bytes for chunk in group), tuple(group))
        for index, group in enumerate(groups)
    ]


def first_wrong_byte(segment: Segment, data: memoryview) -> int | None:
    """Compare a segment's bytes with its hashes; the file offset of the first chunk that differs, or None."""
    for chunk in segment.chunks:
        start = chunk.offset - segment.offset
        if xxhash.xxh3_128_hexdigest(data[start : start + chunk.bytes]) != chunk.xxh3_128:
            return chunk.offset
    return None
