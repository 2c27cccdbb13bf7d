"""What a filesystem refuses for a while: a full disk, a used-up quota, a handle that is stale. It is tried again.

What is only reported is written by `hpcrl.reporting`, which tries for ever and waits for nothing. This is for what work
waits for.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["NO_SPACE", "PASSING", "passes", "patiently"]

_log = logging.getLogger(__name__)
T = TypeVar("T")

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
PASSING = NO_SPACE | {
    errno.ESTALE,
    errno.EIO,
    errno.EAGAIN,
    errno.ETIMEDOUT,
    errno.ENOTCONN,
    errno.ESHUTDOWN,
    errno.EREMOTEIO,
    errno.ECONNRESET,
}
"""What a filesystem says that may take the same a moment later. Not: a permission, a read-only filesystem, a name."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 2.0


def passes(error: BaseException | None) -> bool:
    """Whether a failure, or what it came from, may be over in a moment."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in PASSING:
            return True
        error = error.__cause__
    return False


def patiently(action: Callable[[], T], *, limit_s: float, what: str, sleep: Callable[[float], None] = time.sleep) -> T:
    """What ``action`` returns, the first time that the filesystem lets it.

    Parameters
    ----------
    limit_s:
        How long it is tried, in seconds; then its error is raised.
    what:
        For the log, which hears of it once.
    """
    began, pause_s, said = time.monotonic(), _FIRST_PAUSE_S, False
    while True:
        try:
            return action()
        except Exception as error:
            if not passes(error) or time.monotonic() - began + pause_s > limit_s:
                raise
            if not said:
                _log.warning("%s is tried again for %g s: %s", what, limit_s, error)
            said = True
        sleep(pause_s)
        pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)
