"""The log of a process with an event loop, written by a thread.

The log is a file of the run's filesystem, as reports are (`hpcrl.reporting.reports`): if that does not answer, a log
line must not block the event loop that writes it.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import time

_MAX_LINES = 10_000
"""Maximum queued lines; more are dropped and counted."""
_AT_EXIT_S = 3.0
_POLL_S = 0.01


class _Beside(logging.Handler):
    """Hands records to another handler, in a thread."""

    def __init__(self, behind: logging.Handler) -> None:
        super().__init__(behind.level)
        self._behind = behind
        self._waiting: queue.Queue[logging.LogRecord] = queue.Queue(_MAX_LINES)
        self._dropped = 0
        self._direct = False
        threading.Thread(target=self._write, name="log", daemon=True).start()
        os.register_at_fork(after_in_child=self._forked)
        atexit.register(self._drain)

    def emit(self, record: logging.LogRecord) -> None:
        if self._direct:
            self._behind.handle(record)
            return
        try:
            # format now: the arguments may change before the line is written
            record.msg, record.args = record.getMessage(), None
            if record.exc_info and not record.exc_text:
                record.exc_text = logging.Formatter().formatException(record.exc_info)
            self._waiting.put_nowait(record)
        except queue.Full:
            self._dropped += 1
        except Exception:  # noqa: BLE001 - a line that cannot be formatted must not fail the caller
            self.handleError(record)

    def _write(self) -> None:
        while True:
            record = self._waiting.get()
            self._behind.handle(record)
            dropped, self._dropped = self._dropped, 0
            if dropped:
                words = f"{dropped} lines of this log were dropped: they could not be written"
                self._behind.handle(logging.makeLogRecord({"msg": words, "levelname": "WARNING", "name": __name__}))
            self._waiting.task_done()

    def _forked(self) -> None:
        """Write directly from now on: a forked child has no writer thread."""
        self._direct = True

    def _drain(self) -> None:
        deadline = time.monotonic() + _AT_EXIT_S
        while self._waiting.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(_POLL_S)


def log_in_thread() -> None:
    """Let a thread per handler of the root logger do its writing from now on."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        if not isinstance(handler, _Beside):
            root.removeHandler(handler)
            root.addHandler(_Beside(handler))
