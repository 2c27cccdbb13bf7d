"""Finds the request because of which a step failed, so that it alone fails.

An exception of a step does not name the request that caused it. After a step of several requests has failed, all of
them go back into the queue and then run alone, one after the other, until each has sampled a token: the one that fails
alone is the one. Its KV is dropped with it; the others are computed again, mostly from the prefix cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from hpcrl.inference.embedded.engine.request import EngineRequest

_MAX_FAILURES = 8
"""Maximum failed steps or answers without a working one in between; then the engine counts as broken."""
_MAX_ROUNDS = 3
"""The same if steps of several requests fail although each of these requests works alone."""


class Suspects:
    """The requests of a step that failed, and how often something failed lately."""

    def __init__(self) -> None:
        self._queue: deque[tuple[EngineRequest, int]] = deque()
        self._failures = self._rounds = 0

    @property
    def current(self) -> EngineRequest | None:
        """Return the request that has to run alone now; None if all may run."""
        while self._queue and self._queue[0][0].ended:
            self._queue.popleft()
        return self._queue[0][0] if self._queue else None

    def begin(self, requests: Iterable[EngineRequest]) -> None:
        """Suspect requests, which hold no row."""
        self._queue = deque((request, len(request.tokens)) for request in requests)
        self._rounds += 1

    def passes(self, num_tokens: int) -> bool:
        """Return whether the current request, which now has ``num_tokens``, has shown that it works."""
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
        """Reset the count of rounds: the request that made a step fail was found."""
        self._rounds = 0

    def worked(self) -> None:
        """Reset the count of failures: a token was sampled."""
        self._failures = 0
