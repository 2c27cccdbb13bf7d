"""File operations in a sandbox, run by a process that has its mounts and the rights of its programs.

Paths are resolved by the kernel inside the sandbox: a link that points out of the work tree leads to the sandbox's own
files and nowhere else. Programs in the sandbox can neither see this process nor send it a signal.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Callable, Container, Iterator
from typing import BinaryIO

from hpcrl.sandboxes.archive import (
    ABSENT,
    DIRECTORY,
    END,
    FAILED,
    FILE,
    LINK,
    ArchiveRecord,
    paths_below,
    read_file,
    read_records,
    record_of,
    write_record,
)

NO_SPACE = (b"28", b"122", b"27")
"""Paths of a record of the kind ``FAILED`` are error numbers: ENOSPC, EDQUOT, EFBIG."""


def answer(operation: str, work: bytes, given: BinaryIO | None, out: BinaryIO, *, max_bytes: int) -> None:
    """Carry out an operation, and write records about it: those it yields, and ``END`` or ``FAILED``.

    ``max_bytes`` is the maximum of the contents that it yields.
    """
    try:
        os.umask(0o022)
        os.chdir(work)
        for record in FILE_OPERATIONS[operation](given, max_bytes):
            write_record(out, record)
        write_record(out, ArchiveRecord(END, False, b""))
    except OSError as error:
        where = f"{os.fsdecode(error.filename)}: " if error.filename else ""
        what = f"{where}{error.strerror or error}".encode("utf-8", "surrogateescape")
        write_record(out, ArchiveRecord(FAILED, False, str(error.errno or 0).encode(), what))
    out.flush()


def unpack(given: BinaryIO | None, max_bytes: int) -> Iterator[ArchiveRecord]:
    """Write the files of an archive into the work tree; remove those whose record says that they are absent."""
    for record in read_records(given) if given else ():
        _make(record)
    yield from ()


def fetch(given: BinaryIO | None, max_bytes: int) -> Iterator[ArchiveRecord]:
    """Yield the contents of the regular files that an archive names; links are followed."""
    assert given is not None
    left = max_bytes
    for wanted in read_records(given):
        try:
            content = read_file(wanted.path, follow=True, max_bytes=left)
        except (OSError, ValueError) as error:
            if getattr(error, "errno", None) == errno.EFBIG:
                raise OSError(errno.EFBIG, f"the files have more than {max_bytes} bytes") from None
            continue
        left -= len(content)
        yield ArchiveRecord(FILE, False, wanted.path, content)


def pack(given: BinaryIO | None, max_bytes: int) -> Iterator[ArchiveRecord]:
    """Yield the whole work tree."""
    yield from _changed((), max_bytes)


def compare(given: BinaryIO | None, max_bytes: int) -> Iterator[ArchiveRecord]:
    """Yield what differs from the tree in an archive: new records, and those of the kind ``ABSENT``."""
    assert given is not None
    left = max_bytes
    known: set[bytes] = set()
    for base in read_records(given):
        known.add(base.path)
        # an unchanged file is as long as it was
        now = _bounded(base.path, max(left, len(base.content)), max_bytes)
        if now == base:
            continue
        if now is None:
            yield ArchiveRecord(ABSENT, False, base.path)
            continue
        left = _less(left, now, max_bytes)
        yield now
    yield from _changed(known, left, of=max_bytes)


FILE_OPERATIONS: dict[str, Callable[[BinaryIO | None, int], Iterator[ArchiveRecord]]] = {
    "unpack": unpack,
    "fetch": fetch,
    "pack": pack,
    "compare": compare,
}


def _changed(known: Container[bytes], left: int, *, of: int | None = None) -> Iterator[ArchiveRecord]:
    """Yield the entries of the work tree that are not at known paths."""
    for path in paths_below(b"."):
        if path not in known and (new := _bounded(path, left, of or left)):
            left = _less(left, new, of or left)
            yield new


def _bounded(path: bytes, left: int, max_bytes: int) -> ArchiveRecord | None:
    try:
        return record_of(path, path, max_bytes=left)
    except OSError:
        raise OSError(errno.EFBIG, f"the files have more than {max_bytes} bytes") from None


def _less(left: int, record: ArchiveRecord, max_bytes: int) -> int:
    if len(record.content) > left:
        raise OSError(errno.EFBIG, f"the files have more than {max_bytes} bytes")
    return left - len(record.content)


def _make(record: ArchiveRecord) -> None:
    path = record.path
    if record.kind == ABSENT:
        _remove(path)
        return
    if record.kind == DIRECTORY:
        if not (os.path.isdir(path) and not os.path.islink(path)):
            _remove(path)
            os.makedirs(path)
        return
    if parent := os.path.dirname(path):
        os.makedirs(parent, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        _remove(path)
    if record.kind == LINK:
        os.symlink(record.content, path)
        return
    mode = 0o755 if record.executable else 0o644
    # a program may put a link where the old file was: this fails then, and does not write through it
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    with open(fd, "wb") as stream:
        stream.write(record.content)


def _remove(path: bytes) -> None:
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    if stat.S_ISDIR(mode):
        shutil.rmtree(path)
    else:
        os.unlink(path)
