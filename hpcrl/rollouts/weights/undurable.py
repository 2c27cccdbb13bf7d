"""Versions that are announced before they are durable: which there are, and which engines wait for one of them.

An engine that cannot pull such a version keeps what it serves. It tries again at intervals, because the version may
never become durable, and at once when the version is durable or a newer one is announced.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from hpcrl.rollouts.engines.engine import Engine
from hpcrl.weights import HandoffStore
from hpcrl.weights.read.announced import announced_versions

_AGAIN_S = 10.0
"""Seconds after which an engine tries a version again that it could not pull."""


class UndurableVersions:
    """Versions of a store as the orchestrator sees them, and engines that wait.

    Attributes
    ----------
    durable:
        The newest durable version at the last look; -1 before the first.
    """

    def __init__(self, store: HandoffStore, clock: Callable[[], float] = time.monotonic) -> None:
        """Remember the store; nothing is read yet."""
        self._store, self._clock = store, clock
        self._waiting: dict[Engine, tuple[int, float]] = {}
        self.durable = -1

    def look(self) -> int | None:
        """Return the newest version, durable or announced; None where there is none (OSError: unknown now)."""
        newest = self._store.newest()
        if newest is not None:
            self.durable = newest
        return max([*announced_versions(self._store.root), *([] if newest is None else [newest])], default=None)

    def wait(self, engine: Engine, version: int) -> None:
        """Note that an engine could not pull ``version``, which is not durable."""
        self._waiting[engine] = version, self._clock() + _AGAIN_S

    def end_waits(self) -> bool:
        """Let engines try again whose version is durable now, or that have waited; return whether there were any."""
        now = self._clock()
        over = [
            engine for engine, (version, until_s) in self._waiting.items() if version <= self.durable or now >= until_s
        ]
        for engine in over:
            del self._waiting[engine]
        return bool(over)

    def choose(self, engine: Engine, target: int) -> int:
        """Return the version for an engine: ``target``, or the newest durable one while it waits for ``target``."""
        waits_for, _ = self._waiting.get(engine, (-1, 0.0))
        return self.durable if target <= waits_for else target
