"""What a process says about its work, for people and for other processes: written by a thread, never waited for.

A shared filesystem fails for seconds (a stale handle, a quota that a checkpoint fills), or does not answer. Work that
is worth days must neither end nor stop for a line that says how far it is. So each process has one thread that writes
its reports: what could not be written is tried again, is said once in the log, and is caught up later. Only an end
waits for it, and not for ever.

This is for reports. What others build on (checkpoints, hand-offs, which checkpoint is restored) is written by
`hpcrl.fs` where it is made, and fails loudly.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from hpcrl.fs import atomic_write, open_log

__all__ = ["Outage", "Report", "ReportedFile", "ReportedLines", "flush", "problems"]

_log = logging.getLogger(__name__)
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_HURRIED_PAUSE_S = 0.2
"""Between two tries while somebody waits."""
_LAST_FLUSH_S = 5.0
"""What the exit of the interpreter waits for."""
_MAX_BYTES = 4 << 20
"""Lines of one file that wait in memory."""
_MAX_FILE_BYTES = 256 << 20
"""Contents of files that wait in memory, of all together."""
_TOO_SLOW = "it was written more slowly than there was to say"
"""The problem where lines were given up and no write failed."""


class Outage(NamedTuple):
    """A time in which a report could not be written.

    Attributes
    ----------
    path:
        The file.
    seconds:
        From the first failure to the first success.
    problem:
        The first error.
    dropped:
        Lines that were given up, because too many waited.
    """

    path: Path
    seconds: float
    problem: str
    dropped: int


class Report(ABC):
    """A file that this process reports to; see `ReportedFile` and `ReportedLines`.

    Parameters
    ----------
    path:
        The file. Its directory is made where it is missing.
    on_caught_up:
        Called, in the thread that writes, when the file could be written again after an outage.
    """

    def __init__(self, path: Path, *, on_caught_up: Callable[[Outage], None] | None = None) -> None:
        self.path, self._on_caught_up = path, on_caught_up
        self._order = 0  # of what waits: reports are written in this order, as far as they can be
        self._in_hand = False
        self._due = 0.0
        self._pause_s = 0.0
        self._failed_at: float | None = None
        self._problem = ""
        self._dropped = 0
        self._has_directory = False

    def flush(self, timeout_s: float) -> bool:
        """Wait until all is written, for so many seconds at most; whether it is."""
        return _writer.flush(timeout_s, self)

    @property
    @abstractmethod
    def _waits(self) -> bool:
        """Whether there is something to write."""

    @abstractmethod
    def _take(self) -> list[bytes]:
        """What is to be written now; it waits no longer."""

    @abstractmethod
    def _put_back(self, data: list[bytes]) -> None:
        """What could not be written waits again, before what came meanwhile."""

    @abstractmethod
    def _write(self, data: list[bytes]) -> None:
        """Write, and remove what was written from ``data``. OSError where that fails."""

    def _try_to_write(self, data: list[bytes]) -> str:
        """`_write`; returns what went wrong, empty where nothing did."""
        try:
            if not self._has_directory:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            self._write(data)
        except OSError as error:
            self._has_directory = False
            return str(error)
        except Exception as error:  # noqa: BLE001 - whatever it is: the thread must live, and the work go on
            _log.exception("a report was not written")
            return repr(error)
        self._has_directory = True
        return ""


class ReportedFile(Report):
    """A file that is replaced as a whole: of several contents that wait, the newest is written.

    Parameters
    ----------
    durable:
        See `hpcrl.fs.atomic_write`.
    """

    def __init__(
        self, path: Path, *, durable: bool = True, on_caught_up: Callable[[Outage], None] | None = None
    ) -> None:
        super().__init__(path, on_caught_up=on_caught_up)
        self._durable = durable
        self._content: bytes | None = None
        self.bytes = 0
        self.superseded = False
        """Another object has newer content for this file: what could not be written is given up."""

    def put(self, data: bytes) -> None:
        """Let the file have this content."""
        with _writer.changing(self):
            self._content, self.superseded = data, False
            self.bytes = len(data)
            self._order = _writer.next_order()  # lines that were said before this content come before it
            _writer.supersede(self)
            _writer.bound()

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
        with _writer.changing(self):
            if not self._lines and not self._in_hand:
                self._order = _writer.next_order()
            self._lines.append(line)
            self._bytes += len(line)
            self._bound()

    def close(self) -> None:
        """Let go of the file once all is written; a later `append` opens it again."""
        with _writer.changing(self):
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
                self._fd = open_log(self.path)  # what was torn is ended there, and is a line that readers pass over
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
            self._let_go()  # a handle that is stale stays stale: the next try opens the file anew
            raise

    def _let_go(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class _Changing:
    """Holds the lock of the writer while a report takes something in."""

    def __init__(self, writer: _Writer, report: Report) -> None:
        self._writer, self._report = writer, report

    def __enter__(self) -> None:
        self._writer.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._writer.wake(self._report)
        self._writer.lock.release()


class _Writer:
    """The thread that writes the reports of this process, started with the first of them."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self._thread: threading.Thread | None = None
        self._reports: list[Report] = []
        self._orders = 0
        self._waiting = 0

    def forget(self) -> None:
        """After a fork: what the parent has to say is the parent's to write."""
        for report in self._reports:
            report._in_hand = False
            if report._waits:
                report._take()
        self._reset()

    def supersede(self, newest: ReportedFile) -> None:
        """Give up older contents of the same file that wait in another object."""
        older = [r for r in self._reports if isinstance(r, ReportedFile) and r is not newest and r.path == newest.path]
        for report in older:
            report.superseded = True
            if report._waits:
                report._take()
            if not report._in_hand:
                self._reports.remove(report)

    def next_order(self) -> int:
        self._orders += 1
        return self._orders

    def bound(self) -> None:
        """Give up the oldest contents where too many wait: memory is needed for the work."""
        waiting = sorted((r for r in self._reports if isinstance(r, ReportedFile) and r._waits), key=lambda r: r._order)
        total = sum(report.bytes for report in waiting)
        for report in waiting:
            if total <= _MAX_FILE_BYTES:
                return
            total -= report.bytes
            report._take()
            if not report._in_hand:
                self._reports.remove(report)
            _log.error("%s is given up: too much waits to be written", report.path)

    def changing(self, report: Report) -> _Changing:
        return _Changing(self, report)

    def wake(self, report: Report) -> None:
        if report._waits and report not in self._reports:
            self._reports.append(report)
        if self._reports and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._run, name="reports", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def flush(self, timeout_s: float, only: Report | None = None, *, directory: Path | None = None) -> bool:
        def done() -> bool:
            return not any(
                only in (None, report) and directory in (None, report.path.parent) for report in self._reports
            )

        with self._changed:
            self._waiting += 1
            for report in self._reports:
                report._due = 0.0
            self._changed.notify_all()
            try:
                return self._changed.wait_for(done, timeout_s)
            finally:
                self._waiting -= 1

    def problems(self) -> list[str]:
        with self.lock:
            return [f"{r.path.name} cannot be written: {r._problem}" for r in self._reports if r._problem]

    def _run(self) -> None:
        while True:
            with self._changed:
                report = self._next()
                data, report._in_hand = report._take(), True
            problem = report._try_to_write(data)
            self._settle(report, data, problem)()
            with self._changed:  # only now: who waits for the report waits for the word about it, too
                if not report._waits and report in self._reports:
                    self._reports.remove(report)
                self._changed.notify_all()

    def _next(self) -> Report:
        """Wait for the report that is to be written now."""
        while True:
            now = time.monotonic()
            due = [report for report in self._reports if report._waits and report._due <= now]
            if due:
                return min(due, key=lambda report: report._order)
            soonest = min((report._due for report in self._reports if report._waits), default=None)
            self._changed.wait(None if soonest is None else soonest - now)

    def _settle(self, report: Report, data: list[bytes], problem: str) -> Callable[[], object]:
        """Note how a try went; returns what is to be said about it without the lock."""
        say: Callable[[], object] = _nothing
        with self._changed:
            report._in_hand = False
            if problem:
                report._put_back(data)
                longest_s = _HURRIED_PAUSE_S if self._waiting else _LONGEST_PAUSE_S
                report._pause_s = min(longest_s, max(_FIRST_PAUSE_S, 2 * report._pause_s))
                report._due = time.monotonic() + report._pause_s
                if report._failed_at is None:
                    report._failed_at, report._problem = time.monotonic(), problem
                    say = partial(_say_failed, report.path, problem)
            else:
                if report._failed_at is not None or report._dropped:
                    now = time.monotonic()
                    seconds = now - (now if report._failed_at is None else report._failed_at)
                    outage = Outage(report.path, seconds, report._problem or _TOO_SLOW, report._dropped)
                    say = partial(_say_caught_up, report, outage)
                report._failed_at, report._problem, report._dropped = None, "", 0
                report._pause_s = report._due = 0.0
        return say


def _nothing() -> None:
    pass


def _say_failed(path: Path, problem: str) -> None:
    _log.warning("%s cannot be written, and is tried again until it can: %s", path, problem)


def _say_caught_up(report: Report, outage: Outage) -> None:
    lost = f"; {outage.dropped} lines were given up" if outage.dropped else ""
    _log.warning("%s can be written again, after %.1f s%s", outage.path, outage.seconds, lost)
    if report._on_caught_up is not None:
        report._on_caught_up(outage)


_writer = _Writer()


def flush(timeout_s: float, *, directory: Path | None = None) -> bool:
    """Wait until the reports of this process (to one directory) are written, for so many seconds at most; whether
    they are."""
    return _writer.flush(timeout_s, directory=directory)


def problems() -> list[str]:
    """What cannot be written now, a sentence each."""
    return _writer.problems()


def _flush_at_exit() -> None:
    if not _writer.flush(_LAST_FLUSH_S):
        _log.error("this process ends with reports that were not written: %s", "; ".join(_writer.problems()))


atexit.register(_flush_at_exit)
os.register_at_fork(after_in_child=_writer.forget)
