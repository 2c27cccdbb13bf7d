"""Bounded logging of what strangers cause: a burst is logged whole, then one message per interval with a count.

Every client can make a server log something: a malformed request, a connection that cannot be accepted.
Logs lie on the shared filesystem, so the rate of such messages must not be chosen by the sender.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from hpcrl.reporting.screen_text import visible_line

_BURST = 30
_EVERY_S = 10.0
_PEERS_FAULTS = frozenset({"HttpProcessingError", "RequestPayloadError"})
"""Classes of aiohttp's errors: for a head, and for a body that is read after its request was answered."""
MAX_CHARACTERS = 200
"""Maximum length of a text from a stranger in a log, in characters."""


class LogBudget:
    """A token bucket for messages.

    Parameters
    ----------
    burst:
        Messages that may be logged at once.
    every_s:
        Seconds until one more message may be logged.
    clock:
        Monotonic time in seconds.
    """

    def __init__(
        self, burst: int = _BURST, every_s: float = _EVERY_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._burst, self._every_s, self._clock = float(burst), every_s, clock
        self._left, self._refilled_s = float(burst), clock()

    def take(self) -> bool:
        """Return whether a message may be logged now, and count it if so."""
        if self.wait_s() > 0.0:
            return False
        self._left -= 1.0
        return True

    def wait_s(self) -> float:
        """Return the seconds until the next message may be logged; 0 if one may be logged now."""
        now = self._clock()
        self._left = min(self._burst, self._left + (now - self._refilled_s) / self._every_s)
        self._refilled_s = now
        return 0.0 if self._left >= 1.0 else (1.0 - self._left) * self._every_s


class LogBudgetFilter(logging.Filter):
    """Drops records beyond a budget; the next logged record contains the number of dropped ones.

    Errors that a peer's malformed request causes are logged in one line: their traceback shows the HTTP library alone.
    """

    def __init__(self, budget: LogBudget | None = None) -> None:
        super().__init__()
        self._budget, self._dropped = budget or LogBudget(), 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Decide about one record."""
        if record.levelno < logging.WARNING:
            return True
        if not self._budget.take():
            self._dropped += 1
            return False
        message = record.getMessage()
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and _is_peers_fault(error):
            message = f"{message}: {visible_line(f'{type(error).__name__}: {error}', MAX_CHARACTERS)}"
            record.exc_info = record.exc_text = None
        if self._dropped:
            message = f"{message} ({self._dropped} more messages of this logger were dropped)"
            self._dropped = 0
        record.msg, record.args = message, ()
        return True


def limit_logger(name: str) -> None:
    """Bound the rate of warnings and errors that the logger ``name`` writes itself (idempotent)."""
    logger = logging.getLogger(name)
    if not any(isinstance(each, LogBudgetFilter) for each in logger.filters):
        logger.addFilter(LogBudgetFilter())


def _is_peers_fault(error: BaseException) -> bool:
    """Return whether aiohttp raised ``error`` for a request that is not HTTP, or whose body is invalid."""
    # not imported: servers that do not use aiohttp have loggers that are limited as well
    return any(base.__name__ in _PEERS_FAULTS for base in type(error).__mro__)
