"""Trees of files as one stream of bytes: what goes into a sandbox, what comes out of it, and how trees are kept.

A record is a header, the path, and the content. Streams that come out of a sandbox are made by our own process in it,
but of files that a program made: names are any bytes but NUL, and sizes are checked before anything is kept.
Standard library only.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

DIRECTORY, FILE, LINK, ABSENT, END, FAILED = b"d", b"f", b"l", b"x", b"e", b"!"
"""Kinds of records. ``ABSENT`` is a path that is no longer there; a whole stream has ``END`` or ``FAILED`` last."""

_HEADER = struct.Struct(">cBIQ")
_KINDS = frozenset((DIRECTORY, FILE, LINK, ABSENT, END, FAILED))
_MAX_PATH = 4096
_CHUNK = 1 << 18


class ArchiveError(Exception):
    """A stream is not an archive, is torn, or is larger than allowed."""


class ArchiveRecord(NamedTuple):
    """One path of a tree.

    Attributes
    ----------
    kind:
        One of the kinds above.
    executable:
        A file has executable bits.
    path:
        Relative to the tree.
    content:
        Content of a file, target of a link, message of a failure; else empty.
    """

    kind: bytes
    executable: bool
    path: bytes
    content: bytes = b""


def write_record(stream: BinaryIO, record: ArchiveRecord) -> None:
    """Append a record."""
    stream.write(encoded(record))


def read_records(stream: BinaryIO, *, max_bytes: int | None = None) -> Iterator[ArchiveRecord]:
    """Yield records up to ``END``, which is not yielded, or up to one of the kind ``FAILED``, which is.

    Raises
    ------
    ArchiveError
        The stream is torn or no archive, or its contents have more than ``max_bytes`` bytes.
    """
    total = 0
    while True:
        kind, executable, length, size = _HEADER.unpack(_exactly(stream, _HEADER.size))
        if kind not in _KINDS or length > _MAX_PATH or executable > 1:
            raise ArchiveError("not an archive of a tree")
        total += size
        if max_bytes is not None and total > max_bytes:
            raise ArchiveError(f"more than {max_bytes} bytes")
        path = _exactly(stream, length)
        if b"\0" in path:
            raise ArchiveError("not an archive of a tree")
        if kind == END:
            return
        yield ArchiveRecord(kind, bool(executable), path, _exactly(stream, size))
        if kind == FAILED:
            return


def paths_below(root: bytes) -> list[bytes]:
    """Return the sorted paths of everything below a directory, relative to it; links are not followed.

    Unreadable entries are left out, except for the directory itself (OSError).
    """
    found: list[bytes] = []
    pending: list[bytes] = [b""]
    while pending:
        directory = pending.pop()
        try:
            with os.scandir(os.path.join(root, directory) if directory else root) as entries:
                for entry in entries:
                    path = os.path.join(directory, entry.name) if directory else entry.name
                    if len(path) <= _MAX_PATH:
                        found.append(path)
                        if entry.is_dir(follow_symlinks=False):
                            pending.append(path)
        except OSError:
            if not directory:
                raise
    return sorted(found)


def records_of(root: bytes) -> Iterator[ArchiveRecord]:
    """Yield the files, links and directories below a directory. Devices, sockets and pipes are left out."""
    for path in paths_below(root):
        if record := record_of(os.path.join(root, path), path):
            yield record


def record_of(file: bytes, path: bytes, *, max_bytes: int | None = None) -> ArchiveRecord | None:
    """Return the record of one file without following a link; None where it has no content, or is gone.

    Raises
    ------
    OSError
        With EFBIG: it has more than ``max_bytes`` bytes. A file with holes may have more than fit on its filesystem.
    """
    try:
        found = os.lstat(file)
        if stat.S_ISLNK(found.st_mode):
            return ArchiveRecord(LINK, False, path, os.readlink(file))
        if stat.S_ISDIR(found.st_mode):
            return ArchiveRecord(DIRECTORY, False, path)
        if stat.S_ISREG(found.st_mode):
            content = read_file(file, follow=False, max_bytes=max_bytes)
            return ArchiveRecord(FILE, bool(found.st_mode & 0o111), path, content)
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise
    return None  # a program removed it meanwhile, or made it unreadable


def read_file(file: bytes, *, follow: bool, max_bytes: int | None = None) -> bytes:
    """Return the content of a regular file; OSError for everything else. A pipe is not waited for."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    fd = os.open(file, flags)
    with open(fd, "rb") as stream:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        content = stream.read() if max_bytes is None else stream.read(max_bytes + 1)
        if max_bytes is not None and len(content) > max_bytes:
            raise OSError(errno.EFBIG, f"the file has more than the {max_bytes} bytes that are left for it", file)
        return content


def encoded(record: ArchiveRecord) -> bytes:
    """Return the bytes of a record."""
    head = _HEADER.pack(record.kind, record.executable, len(record.path), len(record.content))
    return head + record.path + record.content


def _exactly(stream: BinaryIO, size: int) -> bytes:
    pieces, missing = [], size
    while missing:
        # by chunks: a size that a torn stream claims is not allocated at once
        piece = stream.read(min(missing, _CHUNK))
        if not piece:
            raise ArchiveError("the stream ends in the middle of a record")
        pieces.append(piece)
        missing -= len(piece)
    return b"".join(pieces)
