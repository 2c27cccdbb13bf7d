"""Adds up the seconds in which only a newer version of the policy would let rollouts begin."""

from __future__ import annotations

import time
from collections.abc import Callable


class PolicyWait:
    """Clock that runs while rollouts wait for a version.

    Parameters
    ----------
    clock:
        Returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._seconds = clock, 0.0
        self._since: float | None = None

    def note(self, *, waits: bool) -> None:
        """Record whether rollouts wait from now on."""
        now = self._clock()
        if self._since is not None:
            self._seconds += now - self._since
        self._since = now if waits else None

    @property
    def seconds(self) -> float:
        """Return the seconds of all waits, with the one that lasts."""
        return self._seconds + (0.0 if self._since is None else self._clock() - self._since)
