"""Sealed files: files of lines that no process appends to any more, compressed as ``NAME.gz`` in place of ``NAME``.

Compression is gzip, which Python brings: a login node has only the core packages. `seal_file` writes the compressed
form under a temporary name, compares it with the file, makes it durable, and removes the file last. A process that
ends in between leaves the file, or both forms. Readers take the file where it exists and the compressed form where it
does not, and never both. Positions are those of the lines without compression.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import io
import os
import stat
import uuid
import zlib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import BinaryIO, cast

import xxhash

from hpcrl.errors import HpcrlError
from hpcrl.storage import lost_replies
from hpcrl.storage.files import fsync_dir

SUFFIX = ".gz"
_BLOCK_BYTES = 1 << 20
_LINES_BYTES = 1 << 16
"""Size of a buffer for lines in bytes: of many files only the first line is read."""
_LEVEL = 9
"""Level of compression: 7 % smaller than level 6 for a ledger of rollouts, which is compressed once, in a thread."""
_MAX_BYTES = (1 << 32) - 1
"""Maximum size of a file that is sealed in bytes: the end of a compressed file has its size in 32 bits."""
_MIN_BYTES = 18
"""Size of the head and the end of a compressed file in bytes."""
_GONE = frozenset({errno.ENOENT, errno.ESTALE})
"""Error numbers of a file that another process has removed; NFS gives the second one."""
DAMAGE = (EOFError, zlib.error, gzip.BadGzipFile)
"""Errors of a compressed file that is damaged, or is none."""


class SealedFileError(HpcrlError, OSError):
    """A compressed file is damaged."""

    def __str__(self) -> str:
        hint = "if no copy is whole, move it away: only what is in it is missing then"
        return f"{self.filename} is damaged: {self.strerror}\n    hint: {hint}"


def sealed_path(path: Path) -> Path:
    """Return the path of the compressed form of a file."""
    return path.with_name(path.name + SUFFIX)


def seal_file(path: Path, *, size: int, stop: Callable[[], bool] = lambda: False) -> bool:
    """Replace a file that has ended by its compressed form; return whether it was replaced.

    The file stays as it is where it does not exist, where its size is not ``size``, or after ``stop``.

    Parameters
    ----------
    size:
        Bytes that belong to the file. More bytes, of a writer that was thought dead, would have no reader, but are kept
        as evidence.
    stop:
        Returns whether to give up; called once for each MiB.

    Raises
    ------
    OSError
        The filesystem refused, or returned other bytes than were written; the file is as before.
    """
    temporary = path.with_name(f".{path.name}{SUFFIX}.{uuid.uuid4().hex}.tmp")
    try:
        with path.open("rb") as source:
            if os.fstat(source.fileno()).st_size != size or size > _MAX_BYTES:
                return False
            digest = xxhash.xxh3_128()
            with temporary.open("xb") as target:
                # those who may read the file may read its compressed form
                os.fchmod(target.fileno(), stat.S_IMODE(os.fstat(source.fileno()).st_mode))
                with gzip.GzipFile("", "wb", _LEVEL, target, mtime=0) as packed:
                    while block := source.read(_BLOCK_BYTES):
                        if stop():
                            return False
                        digest.update(block)
                        packed.write(block)
                target.flush()
                os.fsync(target.fileno())
            if _content_digest(temporary) != (size, digest.digest()):
                raise OSError(errno.EIO, "its compressed form has other bytes", str(path))
            if os.fstat(source.fileno()).st_size != size:
                return False
        lost_replies.replace(temporary, sealed_path(path))
        fsync_dir(path.parent)  # durable before the file that it replaces is removed
        return lost_replies.unlink(path)
    except FileNotFoundError:  # it is sealed already, or the next writer has removed the temporary file
        return False
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _content_digest(path: Path) -> tuple[int, bytes]:
    """Return size and hash of the content of a compressed file; of a damaged one those of its beginning."""
    size, digest = 0, xxhash.xxh3_128()
    with contextlib.suppress(*DAMAGE), _open_sealed(path) as stream:
        while block := stream.read(_BLOCK_BYTES):
            size += len(block)
            digest.update(block)
    return size, digest.digest()


def remove_remains(directory: Path) -> None:
    """Remove the temporary files that a process left which ended while it sealed a file.

    Another process that seals a file in this directory now gives up, and its file stays.
    """
    for path in directory.glob(f".*{SUFFIX}.*.tmp"):
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def lines_of_file(path: Path) -> Generator[bytes]:
    """Yield the lines of a file with their ends, by its plain path, whether it is sealed or not.

    A file that is sealed meanwhile is read on in its compressed form.

    Raises
    ------
    OSError
        The file cannot be read; FileNotFoundError where it exists in neither form.
    SealedFileError
        The compressed form is damaged.
    """
    at = 0
    try:
        with path.open("rb") as stream:
            for line in stream:
                at += len(line)
                yield line
        return
    except OSError as error:
        if error.errno not in _GONE:
            raise
        gone = error
    with _reading(path, gone), _open_sealed(sealed_path(path)) as stream:
        stream.seek(at)
        yield from stream


def content_from(path: Path, offset: int = 0, size: int = -1) -> bytes:
    """Return at most ``size`` bytes (-1: all) of a file from a position on, by its plain path, sealed or not.

    Raises
    ------
    OSError, SealedFileError
        As for `lines_of_file`.
    """
    try:
        with path.open("rb") as stream:
            stream.seek(offset)
            return stream.read(size)
    except OSError as error:
        if error.errno not in _GONE:
            raise
        gone = error
    with _reading(path, gone):
        if offset and offset >= content_bytes(path):
            return b""  # of a file that was read to its end nothing is decompressed
        with _open_sealed(sealed_path(path)) as stream:
            stream.seek(offset)
            return stream.read(size)


@contextlib.contextmanager
def _reading(path: Path, gone: OSError) -> Iterator[None]:
    """Name the errors of a compressed form."""
    try:
        yield
    except FileNotFoundError:
        raise gone from None
    except DAMAGE as error:
        raise SealedFileError(errno.EIO, str(error), str(sealed_path(path))) from error


def _open_sealed(path: Path) -> BinaryIO:
    if not path.stat().st_size:
        raise EOFError("it is empty")  # Python takes it for one without content
    # lines of a buffer are found in C, those of a compressed file in Python
    return cast("BinaryIO", io.BufferedReader(cast("io.RawIOBase", gzip.open(path, "rb")), _LINES_BYTES))


def content_bytes(path: Path) -> int:
    """Return the size of a file without compression, by its plain path, whether it is sealed or not.

    Raises
    ------
    OSError
        The file cannot be read; FileNotFoundError where it exists in neither form.
    """
    try:
        return path.stat().st_size
    except OSError as error:
        if error.errno not in _GONE:
            raise
        gone = error
    with _reading(path, gone), sealed_path(path).open("rb") as stream:
        if stream.seek(0, os.SEEK_END) < _MIN_BYTES:
            raise EOFError("it is cut off")
        # the last four bytes of a compressed file
        stream.seek(-4, os.SEEK_END)
        return int.from_bytes(stream.read(4), "little")
