"""Files in memory and pipes between the daemon and processes in a sandbox."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
from collections.abc import Iterable, Iterator

from hpcrl.sandboxes.archive import END, FAILED, ArchiveError, ArchiveRecord, encoded, read_records
from hpcrl.sandboxes.inside import NO_SPACE
from hpcrl.sandboxes.interface import SandboxError, SandboxLimitError

_READ_BYTES = 256 << 10


def records_of_answer(answer: bytes, max_bytes: int, rc: int) -> list[ArchiveRecord]:
    """Return the records that a file operation has written.

    Raises
    ------
    SandboxLimitError
        Their contents have more than ``max_bytes`` bytes (0: any number), or the sandbox had no space.
    SandboxError
        The operation failed, or its process with exit code ``rc``.
    """
    try:
        records = list(read_records(io.BytesIO(answer), max_bytes=max_bytes or None))
    except ArchiveError as error:
        if "more than" in str(error):
            raise SandboxLimitError(f"the files have {error}") from None
        raise SandboxError(f"a file operation in the sandbox ended with exit code {rc}: {error}") from None
    if records and records[-1].kind == FAILED:
        failure = records[-1]
        what = failure.content.decode("utf-8", "replace")
        raise SandboxLimitError(what) if failure.path in NO_SPACE else SandboxError(what)
    return records


def read_available(reading: int) -> bytes | None:
    """Return what is in a pipe; empty at its end, None where there is nothing now."""
    try:
        return os.read(reading, _READ_BYTES)
    except BlockingIOError:
        return None


@contextlib.contextmanager
def input_file(content: bytes) -> Iterator[int]:
    """Open standard input of a program: a file in memory, because a pipe would block if the program did not read."""
    fd = _sealed_file(content) if content else os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def archive_file(records: Iterable[ArchiveRecord]) -> Iterator[int]:
    """Open an archive of records for reading."""
    fd = _sealed_file(b"".join([*map(encoded, records), encoded(ArchiveRecord(END, False, b""))]))
    try:
        yield fd
    finally:
        os.close(fd)


def _sealed_file(content: bytes) -> int:
    """Make a file in memory that a program which opens it again cannot change or let grow."""
    fd = os.memfd_create("given", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(fd, "wb", closefd=False) as stream:
        stream.write(content)
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL)
    return fd
