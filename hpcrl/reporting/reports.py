"""Reports of a process about its work, for people and for other processes: written by a thread, never waited for.

A shared filesystem fails for seconds (a stale handle, a quota that a checkpoint fills), or does not answer. Long work
must neither end nor stop for a line about its progress. So each process has one thread that writes its reports: what
could not be written is retried, logged once, and caught up later. Only the end of the process waits for it, up to a
timeout.

This is for reports. What others build on (checkpoints, hand-offs, which checkpoint is restored) is written by
`hpcrl.storage.files` where it is made, and fails loudly.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

from hpcrl.reporting.writer_thread import Outage, Report, writer
from hpcrl.storage.files import atomic_write, open_log

__all__ = ["Outage", "Report", "ReportedFile", "ReportedLines", "flush", "problems"]

_log = logging.getLogger(__name__)
_MAX_BYTES = 4 << 20
"""Maximum bytes of lines of one file that wait in memory."""
_MAX_FILE_BYTES = 256 << 20
"""Maximum bytes of contents of files that wait in memory, of all files together."""


class ReportedFile(Report):
    """A file that is replaced as a whole: of several contents that wait, the newest is written.

    Parameters
    ----------
    durable:
        See `hpcrl.storage.files.atomic_write`.
    """

    def __init__(
        self, path: Path, *, durable: bool = True, on_caught_up: Callable[[Outage], None] | None = None
    ) -> None:
        super().__init__(path, on_caught_up=on_caught_up)
        self._durable = durable
        self._content: bytes | None = None
        self.bytes = 0
        self.superseded = False
        """Another object has newer content for this file: what could not be written is dropped."""

    def put(self, data: bytes) -> None:
        """Let the file have this content."""
        with writer.changing(self):
            self._content, self.superseded = data, False
            self.bytes = len(data)
            self._order = writer.next_order()  # lines that were reported before this content are written before it
            for other in writer.of_kind(ReportedFile):
                if other is not self and other.path == self.path:
                    other.superseded = True
                    writer.give_up(other)
            _bound_contents()

    @property
    def _waits(self) -> bool:
        return self._content is not None

    def _take(self) -> list[bytes]:
        assert self._content is not None
        data, self._content = self._content, None
        return [data]

    def _put_back(self, data: list[bytes]) -> None:
        if data and self._content is None and not self.superseded:
            (self._content,) = data

    def _write(self, data: list[bytes]) -> None:
        atomic_write(self.path, data[0], durable=self._durable)
        data.clear()


def _bound_contents() -> None:
    """Give up the oldest contents where too many wait: memory is needed for the work."""
    waiting = sorted((r for r in writer.of_kind(ReportedFile) if r._waits), key=lambda report: report._order)
    total = sum(report.bytes for report in waiting)
    for report in waiting:
        if total <= _MAX_FILE_BYTES:
            return
        total -= report.bytes
        writer.give_up(report)
        _log.error("%s is discarded: too much data waits to be written", report.path)


class ReportedLines(Report):
    """A file that lines are appended to, each by one ``write``; they survive the death of this process.

    Lines that cannot be written wait in memory, up to some MiB; then the oldest are given up, and counted.
    """

    def __init__(self, path: Path, *, on_caught_up: Callable[[Outage], None] | None = None) -> None:
        super().__init__(path, on_caught_up=on_caught_up)
        self._lines: deque[bytes] = deque()
        self._bytes = 0
        self._fd = -1

    def append(self, line: bytes) -> None:
        """Add a line, given without its newline."""
        with writer.changing(self):
            if not self._lines and not self._in_hand:
                self._order = writer.next_order()
            self._lines.append(line)
            self._bytes += len(line)
            self._bound()

    @property
    def is_written(self) -> bool:
        """Return whether no line waits to be written."""
        with writer.lock:
            return not self._waits and not self._in_hand

    def close(self) -> None:
        """Let go of the file once all is written; a later `append` opens it again."""
        with writer.changing(self):
            if not self._waits and not self._in_hand:
                self._let_go()

    def _bound(self) -> None:
        while self._bytes > _MAX_BYTES and len(self._lines) > 1:
            self._bytes -= len(self._lines.popleft())
            self._dropped += 1

    @property
    def _waits(self) -> bool:
        return bool(self._lines)

    def _take(self) -> list[bytes]:
        data = list(self._lines)
        self._lines.clear()
        self._bytes = 0
        return data

    def _put_back(self, data: list[bytes]) -> None:
        self._lines.extendleft(reversed(data))
        self._bytes += sum(len(line) for line in data)
        self._bound()

    def _write(self, data: list[bytes]) -> None:
        try:
            if self._fd < 0:
                self._fd = open_log(self.path)  # this ends a torn line, which readers skip
            written = 0
            try:
                for line in data:
                    whole = line + b"\n"
                    size = os.write(self._fd, whole)
                    if size < len(whole):
                        raise OSError(f"only {size} of {len(whole)} bytes were written")
                    written += 1
            finally:
                del data[:written]
        except OSError:
            self._let_go()  # a stale handle stays stale: the next try opens the file again
            raise

    def _let_go(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def flush(timeout_s: float, *, directory: Path | None = None) -> bool:
    """Wait until the reports of this process (to one directory) are written, up to a timeout in seconds.

    Return whether they are.
    """
    return writer.flush(timeout_s, directory=directory)


def problems() -> list[str]:
    """Return descriptions of the reports that cannot be written now, one sentence each."""
    return writer.problems()
