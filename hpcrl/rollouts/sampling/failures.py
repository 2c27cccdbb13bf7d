"""Rollouts that fail: one is an accident, many one after the other end the run."""

from __future__ import annotations

import logging

from hpcrl.errors import EnvironmentFailedError, HpcrlError, PeerLostError
from hpcrl.rollouts.engines.client import EngineError
from hpcrl.rollouts.environments import EnvironmentLostError, EnvironmentRaisedError

__all__ = ["FailureCount"]

_log = logging.getLogger(__name__)

_MAX_IN_A_ROW = 64
"""So many rollouts that fail one after the other are no accident."""


class FailureCount:
    """Counts rollouts that failed since one has finished."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self._last_death: tuple[str, int] | None = None

    def finished(self) -> None:
        """A rollout has finished."""
        self._in_a_row = 0

    def failed(self, error: Exception) -> HpcrlError | None:
        """A rollout has failed; returns what ends the run, where these are too many."""
        if isinstance(error, EnvironmentLostError):
            # the death of one process is one failure, however many rollouts it had
            if error.death == self._last_death:
                return None
            self._last_death = error.death
        self._in_a_row += 1
        told = isinstance(error, EnvironmentRaisedError | EnvironmentLostError)
        text = str(error) if told else f"{type(error).__name__}: {error}"
        _log.warning("a rollout failed: %s", text, exc_info=None if told or isinstance(error, EngineError) else error)
        if self._in_a_row < _MAX_IN_A_ROW:
            return None
        count = f"{self._in_a_row} rollouts failed one after the other"
        if told:
            first, *more = text.splitlines()
            return EnvironmentFailedError("\n".join([f"{first} ({count})", *more]))
        lost = isinstance(error, EngineError) and error.unreachable
        kind = PeerLostError if lost else HpcrlError
        return kind(f"{count}; the last: {text}")
