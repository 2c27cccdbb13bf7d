"""Records of versions that a trainer serves from registered memory over the fabric (docs/handoff.md, "Fabric").

Rank 0 of the trainer writes them below its own hidden directory of the store (`hpcrl.storage.fence`)::

    weights/.writer-000002-5f0c1d9a/fabric/v000012.json          where the ranks have the version
    weights/.writer-000002-5f0c1d9a/fabric/v000012.announced.json  its manifest, where it is not durable yet
    weights/.writer-000002-5f0c1d9a/fabric/layout-7c21….msgpack  where each stretch of its files lies

A newer attempt moves that directory away when it begins, so records of an older attempt are gone, and it cannot write
more. What lies in memory begins with a header that names attempt, version and a number that grows with each use, sealed
with the run's token. A reader that finds another header before or after a read discards what it read.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import struct
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from hpcrl.errors import HandoffError
from hpcrl.storage.files import decode_versioned

FABRIC_DIR = "fabric"
FORMAT_VERSION = 1
PAGE_BYTES = 4096
"""Bytes in front of the data of a slot of registered memory; the header is at their beginning."""
WRITER_NAME = re.compile(r"\.writer-(?P<attempt>\d{6,})-(?P<nonce>[0-9a-f]{8})")
_MAGIC = b"hpcrlfab"
_FIELDS = struct.Struct("<8sII8sQqQQ")
HEADER_BYTES = _FIELDS.size + 32


class FabricPeer(msgspec.Struct, frozen=True):
    """A rank of the trainer that serves a part of a version.

    Attributes
    ----------
    endpoint:
        Its transfer engine (`hpcrl.mooncake.TransferEngine`).
    address:
        Address of the header in its memory; the data is a page behind.
    bytes:
        Length of the data.
    sequence:
        Number of this use of the memory.
    """

    endpoint: str
    address: int
    bytes: int
    sequence: int


class FabricRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Record of a version that is served.

    Attributes
    ----------
    version:
        Policy version.
    digest:
        Identifies its manifest (`hpcrl.weights.format.segments.SegmentMap.digest`).
    attempt, nonce:
        Name the writer (`hpcrl.storage.fence.Fence`).
    protocol:
        ``tcp`` or ``rdma``.
    timeout_s:
        Maximum seconds of one read.
    layout:
        File next to the record, a `FabricLayout`.
    peers:
        Ranks of the trainer, in order.
    """

    version: int
    digest: str
    attempt: int
    nonce: str
    protocol: str
    timeout_s: float
    layout: str
    peers: tuple[FabricPeer, ...]
    format_version: int = FORMAT_VERSION


class Stretch(NamedTuple):
    """Stretch of a file that lies in the memory of one rank.

    Attributes
    ----------
    file:
        File of the version.
    offset, bytes:
        Range in the file.
    rank:
        Rank of the trainer that has it.
    at:
        First byte in the data of that rank.
    """

    file: str
    offset: int
    bytes: int
    rank: int
    at: int


class _Packed(msgspec.Struct, frozen=True):
    """Form of a layout on disk: names of files, and four 64-bit numbers for each stretch and the number of its file."""

    files: tuple[str, ...]
    numbers: bytes


class FabricLayout:
    """Map from the files of a version to the memory of ranks."""

    def __init__(self, stretches: Iterable[Stretch]) -> None:
        """Sort ``stretches``; they do not overlap."""
        self._files: dict[str, list[Stretch]] = {}
        for stretch in sorted(stretches):
            self._files.setdefault(stretch.file, []).append(stretch)
        self._begins = {file: [stretch.offset for stretch in found] for file, found in self._files.items()}

    def pieces(self, file: str, offset: int, size: int) -> list[Stretch]:
        """Return the parts of stretches that make up a range of a file, in order.

        Raises
        ------
        HandoffError
            A byte of it is served by no rank.
        """
        found, end = [], offset + size
        stretches, begins = self._files.get(file, []), self._begins.get(file, [])
        number = max(0, bisect_right(begins, offset) - 1)
        while offset < end:
            stretch = stretches[number] if number < len(stretches) else None
            if stretch is None or not stretch.offset <= offset < stretch.offset + stretch.bytes:
                raise HandoffError(f"no rank serves byte {offset} of {file}")
            skipped = offset - stretch.offset
            taken = min(stretch.bytes - skipped, end - offset)
            found.append(Stretch(file, offset, taken, stretch.rank, stretch.at + skipped))
            offset, number = offset + taken, number + 1
        return found

    def encode(self) -> bytes:
        """Return the content of a layout file."""
        numbers = array("q")
        for place, stretches in enumerate(self._files.values()):
            for stretch in stretches:
                numbers.extend((place, stretch.offset, stretch.bytes, stretch.rank, stretch.at))
        return msgspec.msgpack.encode(_Packed(tuple(self._files), numbers.tobytes()))

    @classmethod
    def decode(cls, data: bytes) -> FabricLayout:
        """Read what `encode` made (HandoffError if it is torn)."""
        try:
            packed = msgspec.msgpack.decode(data, type=_Packed)
            numbers = array("q")
            numbers.frombytes(packed.numbers)
            rows = [numbers[i : i + 5] for i in range(0, len(numbers), 5)]
            return cls(Stretch(packed.files[place], *rest) for place, *rest in rows)
        except (ValueError, IndexError, TypeError) as error:
            raise HandoffError(f"the layout of the fabric cannot be read: {error}") from error


def decode_fabric_record(data: bytes) -> FabricRecord:
    """Read a record (HandoffError if it is torn, or of another format)."""
    try:
        return decode_versioned(data, FabricRecord, FORMAT_VERSION)
    except ValueError as error:
        raise HandoffError(f"the record of the fabric cannot be read: {error}") from error


def seal_header(secret: str, *, nonce: str, attempt: int, version: int, rank: int, sequence: int, size: int) -> bytes:
    """Return the header of a slot, ``HEADER_BYTES`` long.

    Parameters
    ----------
    secret:
        Token of the run.
    nonce, attempt:
        Name the writer.
    version, rank, sequence, size:
        Version, rank of the trainer, number of this use of the memory, and length of the data.
    """
    fields = _FIELDS.pack(_MAGIC, FORMAT_VERSION, rank, nonce.encode(), attempt, version, sequence, size)
    return fields + hmac.digest(secret.encode(), b"fabric header " + fields, hashlib.sha256)


def newest_writer(names: Sequence[str]) -> list[str]:
    """Return the hidden directories of the newest attempt among ``names``, entries of a store; usually one."""
    found = [(int(match["attempt"]), name) for name in names if (match := WRITER_NAME.fullmatch(name))]
    newest = max((attempt for attempt, _ in found), default=0)
    return [name for attempt, name in found if attempt == newest]
