"""The thread that writes the reports of a process (`hpcrl.reporting.reports`), in their order and with retries."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

_log = logging.getLogger(__name__)
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_HURRIED_PAUSE_S = 0.2
"""Seconds between two tries while a caller waits."""
_LAST_FLUSH_S = 5.0
"""Timeout in seconds of the wait for reports at the exit of the interpreter."""
_TOO_SLOW = "lines came faster than they could be written"
"""Problem that is reported if lines were dropped although no write failed."""


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
    """A file that this process reports to; see `hpcrl.reporting.reports`.

    Parameters
    ----------
    path:
        The file. Its directory is made where it is missing.
    on_caught_up:
        Called, in the thread that writes, when the file could be written again after an outage.
    """

    def __init__(self, path: Path, *, on_caught_up: Callable[[Outage], None] | None = None) -> None:
        self.path, self._on_caught_up = path, on_caught_up
        self._order = 0  # order of the waiting content: reports are written in this order as far as possible
        self._in_hand = False
        self._due = 0.0
        self._pause_s = 0.0
        self._failed_at: float | None = None
        self._problem = ""
        self._dropped = 0
        self._has_directory = False

    def flush(self, timeout_s: float) -> bool:
        """Wait until all is written, up to a timeout in seconds; return whether it is."""
        return writer.flush(timeout_s, self)

    @property
    @abstractmethod
    def _waits(self) -> bool:
        """Return whether data waits to be written."""

    @abstractmethod
    def _take(self) -> list[bytes]:
        """Remove and return the data to be written now."""

    @abstractmethod
    def _put_back(self, data: list[bytes]) -> None:
        """Put data that could not be written back at the front, before data that arrived meanwhile."""

    @abstractmethod
    def _write(self, data: list[bytes]) -> None:
        """Write, and remove what was written from ``data``. OSError where that fails."""

    def _try_to_write(self, data: list[bytes]) -> str:
        """Call `_write`; return what went wrong, empty if nothing did."""
        try:
            if not self._has_directory:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            self._write(data)
        except OSError as error:
            self._has_directory = False
            return str(error)
        except Exception as error:  # noqa: BLE001 - any error: the thread must survive for later reports
            _log.exception("a report was not written")
            return repr(error)
        self._has_directory = True
        return ""


_R = TypeVar("_R", bound=Report)


class _Changing:
    """Holds the lock of the writer while a report takes something in."""

    def __init__(self, writer: Writer, report: Report) -> None:
        self._writer, self._report = writer, report

    def __enter__(self) -> None:
        self._writer.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._writer.wake(self._report)
        self._writer.lock.release()


class Writer:
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
        """Drop all reports after a fork: the parent writes them."""
        for report in self._reports:
            report._in_hand = False
            if report._waits:
                report._take()
        self._reset()

    def of_kind(self, kind: type[_R]) -> list[_R]:
        """Return the reports of a kind that have data to write or are being written now."""
        return [report for report in self._reports if isinstance(report, kind)]

    def give_up(self, report: Report) -> None:
        """Discard the unwritten data of a report."""
        if report._waits:
            report._take()
        if not report._in_hand:
            self._reports.remove(report)

    def next_order(self) -> int:
        self._orders += 1
        return self._orders

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
            # only after the callbacks: a caller that waits for the report also waits for their message
            with self._changed:
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
        """Record the result of a try; return what to log about it without the lock."""
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
    lost = f"; {outage.dropped} lines were dropped" if outage.dropped else ""
    _log.warning("%s can be written again, after %.1f s%s", outage.path, outage.seconds, lost)
    if report._on_caught_up is not None:
        report._on_caught_up(outage)


writer = Writer()


def _flush_at_exit() -> None:
    if not writer.flush(_LAST_FLUSH_S):
        _log.error("this process ends with reports that were not written: %s", "; ".join(writer.problems()))


atexit.register(_flush_at_exit)
os.register_at_fork(after_in_child=writer.forget)
