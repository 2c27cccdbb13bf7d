"""Writing units of a version into preallocated files: hashed while written, durable when done."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import xxhash

from hpcrl.storage.files import FileRecord
from hpcrl.weights.format.layout import PAGE_BYTES, ShardLayout
from hpcrl.weights.format.manifest import Chunk, TensorRecord, chunk_digests

_log = logging.getLogger(__name__)

#: errors of filesystems that do not support preallocation
_NO_ALLOCATION = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


def preallocate(path: Path, size: int, head: bytes = b"") -> None:
    """Create a file of ``size`` bytes that begins with ``head``, and allocate its space.

    So a full disk or an exceeded quota is known before time is spent on data. Filesystems that cannot allocate
    ahead (NFS before 4.2) only get the length.

    Raises
    ------
    OSError
        ENOSPC, EDQUOT …, with the file's name.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        # glibc's posix_fallocate would write every block where the filesystem cannot: ask the kernel itself
        call = ctypes.CDLL(None, use_errno=True).fallocate
        call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
        if size and call(fd, 0, 0, size) != 0:
            code = ctypes.get_errno()
            if code not in _NO_ALLOCATION:
                raise OSError(code, os.strerror(code), str(path))
            os.ftruncate(fd, size)
        _pwrite(fd, memoryview(head), 0)
        os.fsync(fd)
    finally:
        os.close(fd)


class FileWriter:
    """Writes stretches of files of one directory, and makes them durable. Use as a context manager."""

    def __init__(self, directory: Path, *, direct: bool) -> None:
        """Remember the directory; files are opened as they are needed.

        Parameters
        ----------
        directory:
            Holds the preallocated files.
        direct:
            Bypass the page cache (``O_DIRECT``) for whole pages of page-aligned memory. Where the filesystem
            refuses, a warning is logged and writing continues through the page cache.
        """
        self._directory, self._direct = directory, direct
        self._cached: dict[str, int] = {}
        self._bypassing: dict[str, int] = {}
        self._stack = ExitStack()

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def write(self, file: str, offset: int, data: memoryview, cuts: Sequence[int]) -> list[Chunk]:
        """Write ``data`` at ``offset`` and return its hashed chunks, ``cuts`` being their lengths, all of it together.

        Raises
        ------
        OSError
            ``file`` does not exist, or the storage refused. A refusal of direct I/O alone is not an error.
        """
        chunks: list[Chunk] = []
        position = 0
        for size in cuts:
            digest = xxhash.xxh3_128_hexdigest(data[position : position + size])
            chunks.append(Chunk(offset + position, size, digest))
            position += size
        assert position == data.nbytes
        whole = data.nbytes - data.nbytes % PAGE_BYTES if self._direct and offset % PAGE_BYTES == 0 else 0
        if whole and not self._write_direct(file, offset, data[:whole]):
            whole = 0
        if whole < data.nbytes:
            _pwrite(self._open(file, self._cached), data[whole:], offset + whole)
        return chunks

    def sync(self) -> None:
        """Make all written data durable (OSError where the storage failed)."""
        for fd in {**self._bypassing, **self._cached}.values():
            os.fsync(fd)

    def _write_direct(self, file: str, offset: int, data: memoryview) -> bool:
        try:
            _pwrite(self._open(file, self._bypassing, os.O_DIRECT), data, offset)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            _log.warning("%s takes no direct I/O (%s); writing through the page cache", self._directory, error)
            self._direct = False
        return self._direct

    def _open(self, file: str, opened: dict[str, int], flags: int = 0) -> int:
        if file not in opened:
            opened[file] = os.open(self._directory / file, os.O_WRONLY | os.O_CLOEXEC | flags)
            self._stack.callback(os.close, opened[file])
        return opened[file]


def write_stream(path: Path, blocks: Iterable[memoryview | bytes], chunk_bytes: int) -> FileRecord:
    """Write a file of which only this process writes, block by block, and fsync it; hashed while written."""
    size, digests, digest, room = 0, [], xxhash.xxh3_128(), chunk_bytes
    with path.open("xb") as stream:
        for block in blocks:
            view = memoryview(block)
            stream.write(view)
            size += view.nbytes
            while view.nbytes:
                part = view[:room]
                digest.update(part)
                view, room = view[part.nbytes :], room - part.nbytes
                if not room:
                    digests.append(digest.hexdigest())
                    digest, room = xxhash.xxh3_128(), chunk_bytes
        stream.flush()
        os.fsync(stream.fileno())
    if room < chunk_bytes:
        digests.append(digest.hexdigest())
    return FileRecord(bytes=size, xxh3_128="".join(digests))


def shard_records(
    shard: ShardLayout, digests: Mapping[int, str], chunk_bytes: int
) -> tuple[FileRecord, dict[str, TensorRecord]]:
    """Return the records of a shard from the hashes that its writers made.

    Parameters
    ----------
    shard:
        Its layout.
    digests:
        Hash of each chunk, by offset.
    chunk_bytes:
        Size of hash chunks.
    """
    tensors = {
        tensor.name: TensorRecord(
            dtype=tensor.dtype,
            shape=tensor.shape,
            file=shard.file,
            offset=offset,
            bytes=tensor.bytes,
            xxh3_128="".join(digests[offset + start] for start in range(0, tensor.bytes, chunk_bytes)),
        )
        for tensor, offset in shard.tensors
    }
    return FileRecord(bytes=shard.bytes, xxh3_128=chunk_digests(shard.head, chunk_bytes)), tensors


def _pwrite(fd: int, data: memoryview, offset: int) -> None:
    """Write all of ``data``: the kernel may take less at a time."""
    while data.nbytes:
        written = os.pwrite(fd, data, offset)
        if written <= 0:
            raise OSError(errno.EIO, "the filesystem wrote nothing")
        data, offset = data[written:], offset + written
