"""Finds the request because of which a step failed, so that it alone fails.

What a step raises says nothing about whose numbers it choked on. After a step of several requests has failed, all of
them go back into the queue and then run alone, one after the other, until each has sampled a token: the one that fails
alone is the one. Its KV is dropped with it; the others are computed again, mostly from the prefix cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from hpcrl.inference.embedded.engine.request import EngineRequest

__all__ = ["Suspects"]

_MAX_FAILURES = 8
"""An engine in which so many steps or answers fail without one that works in between is broken as a whole."""
_MAX_ROUNDS = 3
"""The same where steps of several requests fail, and each of these requests works alone."""


class Suspects:
    """The requests of a step that failed, and how often something failed lately."""

    def __init__(self) -> None:
        self._queue: deque[tuple[EngineRequest, int]] = deque()
        self._failures = self._rounds = 0

    @property
    def current(self) -> EngineRequest | None:
        """The request that has to run alone now; None where all may run."""
        while self._queue and self._queue[0][0].ended:
            self._queue.popleft()
        return self._queue[0][0] if self._queue else None

    def begin(self, requests: Iterable[EngineRequest]) -> None:
        """Suspect requests, which hold no row."""
        self._queue = deque((request, len(request.tokens)) for request in requests)
        self._rounds += 1

    def passes(self, num_tokens: int) -> bool:
        """Return whether the current request, which has so many tokens now, has shown that it works."""
        request, before = self._queue[0]
        if num_tokens <= before and not request.ended:
            return False
        self._queue.popleft()
        return True

    def failed(self) -> bool:
        """Note that a request or a step has failed; return whether the engine is broken as a whole."""
        self._failures += 1
        return self._failures >= _MAX_FAILURES or self._rounds >= _MAX_ROUNDS

    def found(self) -> None:
        """The request that made a step fail was found: rounds before count no more."""
        self._rounds = 0

    def worked(self) -> None:
        """A token was sampled."""
        self._failures = 0
