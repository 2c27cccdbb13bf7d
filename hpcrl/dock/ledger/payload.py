"""Columns of finished rollouts on disk: blocks one behind the other in files of limited size.

``rollouts/payload/000001-000003.columns`` is the third file of the writer that began with
``rollouts/ledger/000001.jsonl``.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import xxhash

from hpcrl.dock.ledger.entries import PayloadPlace
from hpcrl.storage.files import fsync_dir

_FILE_BYTES = 256 << 20
_PIECES = 512
"""Maximum pieces of one ``pwritev``; Linux allows 1,024."""


class PayloadWriter:
    """Writes blocks; for one thread.

    What is written again after an error goes to the same place: nothing that was cut off stays between two blocks.
    """

    def __init__(self, directory: Path, writer: int, *, file_bytes: int = _FILE_BYTES) -> None:
        """Begin; no file is made yet. ``writer`` is the number of its first file of entries."""
        self._directory, self._writer, self._file_bytes = directory, writer, file_bytes
        self._number, self._fd, self._end, self._made = 0, -1, 0, False

    @property
    def file(self) -> str:
        """Name of the file that is written."""
        return f"{self._writer:06d}-{self._number:06d}.columns"

    def write(self, blocks: Sequence[Sequence[bytes | memoryview]]) -> list[PayloadPlace]:
        """Write blocks, each given in pieces, and make them durable; returns where each lies.

        Raises
        ------
        OSError
            The filesystem refused; the call may be repeated.
        """
        if self._fd < 0 or self._end >= self._file_bytes:
            self._next_file()
        places, end = [], self._end
        for pieces in blocks:
            size = write_pieces(self._fd, pieces, end)
            digest = xxhash.xxh3_128()
            for piece in pieces:
                digest.update(piece)
            places.append(PayloadPlace(self.file, end, size, digest.hexdigest()))
            end += size
        os.fsync(self._fd)
        if not self._made:
            fsync_dir(self._directory)
            self._made = True
        self._end = end
        return places

    def _next_file(self) -> None:
        self.close()
        self._number, self._end, self._made = self._number + 1, 0, False
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        try:
            self._fd = os.open(self._directory / self.file, flags, 0o644)
        except OSError:
            self._number -= 1
            raise

    def close(self) -> None:
        """End with this file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def write_pieces(fd: int, pieces: Sequence[bytes | memoryview], offset: int) -> int:
    """Write pieces one behind the other from ``offset`` on; returns how many bytes that was."""
    left = [memoryview(piece).cast("B") for piece in pieces if memoryview(piece).nbytes]
    begin = offset
    while left:
        written = os.pwritev(fd, left[:_PIECES], offset)
        offset += written
        while left and written >= left[0].nbytes:
            written -= left.pop(0).nbytes
        if written:
            left[0] = left[0][written:]
    return offset - begin


def read_payload(directory: Path, place: PayloadPlace) -> bytes:
    """Return the block at ``place``, compared with its hash.

    Raises
    ------
    FileNotFoundError
        The file was removed because its rollouts were not needed any more.
    ValueError
        It is truncated, or has another content.
    """
    with (directory / place.file).open("rb") as stream:
        if place.bytes > (left := os.fstat(stream.fileno()).st_size - place.offset):
            # memory is not allocated for bytes that a record claims and a file lacks
            raise ValueError(f"{place.file} ends {place.bytes - left} bytes before the end of a rollout")
        stream.seek(place.offset)
        block = stream.read(place.bytes)
    check_block(block, place)
    return block


def view_payload(directory: Path, place: PayloadPlace) -> memoryview:
    """Return the block at ``place``, mapped: only accessed pages are read, without comparison (errors as above)."""
    begin = place.offset - place.offset % mmap.ALLOCATIONGRANULARITY
    with (directory / place.file).open("rb") as stream:
        mapped = mmap.mmap(stream.fileno(), place.offset + place.bytes - begin, offset=begin, prot=mmap.PROT_READ)
    return memoryview(mapped)[place.offset - begin :]


def check_block(block: bytes | memoryview, place: PayloadPlace) -> None:
    """See that a block is the one that was written at ``place``, wherever it was read (ValueError where not)."""
    if (length := memoryview(block).nbytes) != place.bytes:
        raise ValueError(f"{place.file} ends {place.bytes - length} bytes before the end of a rollout")
    if xxhash.xxh3_128(block).hexdigest() != place.xxh3_128:
        raise ValueError(f"the content of {place.file} at byte {place.offset} is not what was written")
