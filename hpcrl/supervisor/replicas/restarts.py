"""Decides whether a replica that failed is started again, and after which pause."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from hpcrl.config.plan import RolePolicy
from hpcrl.errors import ExitCode
from hpcrl.runs.cause import Cause, CauseKind

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0
_FINAL = frozenset({CauseKind.SPAWN, CauseKind.CANCELLED, CauseKind.NODE_FAIL})
"""Causes that would recur, or that a restart of this replica cannot repair."""


class Restarts:
    """The failures of one replica in this attempt.

    A restart counts for the policy's window, so that an engine that fails once a day is always restarted, and one
    that fails at each start is not. Pauses double from one second to half a minute while failures are in the window.

    Attributes
    ----------
    count:
        Restarts so far.
    """

    def __init__(self, policy: RolePolicy, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._policy, self._clock = policy, clock
        self._failures: list[tuple[float, Cause]] = []
        self.count = 0

    def pause_s(self, cause: Cause) -> float | None:
        """Return the seconds until the replica that failed by ``cause`` is started again; None if it is not.

        A wrong command line (exit code 2) or a command that does not exist is not tried twice.
        """
        policy, now = self._policy, self._clock()
        # old failures leave the window first, so that the pause also begins anew after a quiet time
        self._failures = [entry for entry in self._failures if now - entry[0] < policy.restart_window_s]
        self._failures.append((now, cause))
        hopeless = cause.kind in _FINAL or cause.exit_code == ExitCode.USAGE
        if policy.restart == "never" or hopeless or len(self._failures) > policy.max_restarts:
            return None
        self.count += 1
        return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** (len(self._failures) - 1))

    @property
    def last_failure(self) -> str:
        """Return the newest failure in words; empty if there was none."""
        return self._failures[-1][1].message if self._failures else ""

    def first_error(self) -> Cause:
        """Return the first of the failures that count as the cause of the loss, with the number of restarts."""
        first, last = self._failures[0][1], self._failures[-1][1]
        restarts = len(self._failures) - 1
        if not restarts:
            return first
        times = "once" if restarts == 1 else f"{restarts} times"
        message = f"{first.message}; it was restarted {times} and failed again"
        if last.message != first.message:
            message += f" (at last: {last.message})"
        return msgspec.structs.replace(first, message=message)
