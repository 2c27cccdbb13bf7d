"""Retries for transient refusals of a filesystem: a full disk, a used-up quota, a stale handle.

Use this for writes that must succeed before work continues; use `hpcrl.reporting.reports` for best-effort reports.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable
from typing import TypeVar

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
"""Error numbers that may be transient. Not included: a permission, a read-only filesystem, a name."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 2.0


def is_transient(error: BaseException | None) -> bool:
    """Return whether a failure, or one of its causes, is transient."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in PASSING:
            return True
        error = error.__cause__
    return False


def retry_transient(
    action: Callable[[], T], *, limit_s: float, what: str, sleep: Callable[[float], None] = time.sleep
) -> T:
    """Call ``action`` until it succeeds and return its result; retry transient filesystem errors.

    Parameters
    ----------
    limit_s:
        Timeout in seconds; after it the last error is raised.
    what:
        Description of the action for the log; the first failure is logged, later ones are not.
    """
    began, pause_s, said = time.monotonic(), _FIRST_PAUSE_S, False
    while True:
        try:
            return action()
        except Exception as error:
            if not is_transient(error) or time.monotonic() - began + pause_s > limit_s:
                raise
            if not said:
                _log.warning("trying %s again for %g s: %s", what, limit_s, error)
            said = True
        sleep(pause_s)
        pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)
