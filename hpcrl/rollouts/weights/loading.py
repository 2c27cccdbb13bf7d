"""Load one version from the store into one engine: it reads during its requests, then exchanges weights."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable
from typing import Any

from hpcrl.rollouts.engines.client import HEALTH_S, EngineError
from hpcrl.rollouts.engines.engine import Engine
from hpcrl.rollouts.engines.update_answer import check_update_answer
from hpcrl.rollouts.weights.exchange import begin, exchange, look_at, only_reads, wait_staged
from hpcrl.runs.events import EventWriter
from hpcrl.weights import HandoffStore
from hpcrl.weights.read.share import Pace
from hpcrl.weights.session import SESSION

_log = logging.getLogger(__name__)

_RETRY_S = 1.0
_USUAL_FACTOR = 5.0
_USUAL_FLOOR_S = 10.0
"""Minimum time in seconds after which an exchange of weights counts as hung; else a multiple of the longest one so far.
"""


class VersionLoader:
    """Lets engines load versions.

    Attributes
    ----------
    reading:
        Engines that read a version now, and do not exchange weights yet.
    unloadable:
        The newest version that an engine could not load, and why.
    undurable:
        The version that an engine loads or has loaded last, where it was only announced when that began: it may not be
        loadable, and the engine keeps what it has then.
    """

    def __init__(
        self,
        store: HandoffStore,
        events: EventWriter,
        pace: Pace,
        *,
        pause: bool,
        attempt: int,
        may_fall_back: Callable[[], bool],
    ) -> None:
        """Remember settings: those of `hpcrl.rollouts.weights.updates.WeightUpdater`."""
        self._store, self._events, self._pace = store, events, pace
        self._pause, self._attempt, self._may_fall_back = pause, attempt, may_fall_back
        self.reading: set[Engine] = set()
        self.unloadable: dict[Engine, tuple[int, str]] = {}
        self.undurable: dict[Engine, int] = {}
        self._exchanging: dict[Engine, float] = {}
        self._longest_s: float | None = None

    def exchanging(self, engine: Engine) -> bool:
        """Return whether the weights of an engine are being changed, for no longer than that usually takes."""
        since = self._exchanging.get(engine)
        usual_s = math.inf if self._longest_s is None else max(_USUAL_FLOOR_S, _USUAL_FACTOR * self._longest_s)
        return since is not None and time.monotonic() - since < usual_s

    def end_exchange(self, engine: Engine) -> None:
        """Note that the weights of an engine are not changed any more, or that it failed."""
        self._exchanging.pop(engine, None)
        engine.end_exchange()

    def stuck_before(self, engines: Iterable[Engine], version: int) -> str:
        """Return why no engine can load the newest version, so that waiting for ``version`` is in vain; else empty."""
        there = [engine for engine in engines if not engine.away]
        stuck = [e for e in there if 0 <= e.version < version <= self.unloadable.get(e, (-1, ""))[0]]
        if len(stuck) < len(there):
            return ""
        found = [(engine.name, *self.unloadable[engine]) for engine in stuck]
        return "; ".join(f"{name} cannot load version {newest}: {why}" for name, newest, why in found)

    async def load(self, engine: Engine, version: int) -> tuple[int, float]:
        """Make one attempt. The version is read and verified while the engine generates; only then requests are frozen.

        Where this version cannot be loaded and ``may_fall_back`` permits it, an engine that joins late loads the newest
        loadable version, and one that serves an older version keeps it; the next version is tried again.

        Returns
        -------
        tuple
            The version that is served now, and the seconds that requests were frozen.

        Raises
        ------
        EngineError
            The engine does not accept the version.
        """
        control = engine.client.control
        asked = version
        size, durable = await asyncio.to_thread(look_at, self._store, version)
        limit = self._pace.limit_s(size)
        self.undurable.pop(engine, None)
        if not durable:
            self.undurable[engine] = version
        info: dict[str, Any] = {"path": str(self._store.path_of(version)), "fallback": self._may_fall_back()}
        self.reading.add(engine)
        # numbers must also grow across restarts of the orchestrator
        info[SESSION] = [self._attempt, time.time_ns()]
        await begin(engine.client, limit_s=limit, session=info[SESSION])
        answer = await control("/update_weights", {"update_info": {**info, "stage": True}}, timeout_s=limit)
        answer = check_update_answer(engine.name, answer, asked=version)
        in_place = "version" not in answer
        if in_place:  # vLLM has only begun to read
            await wait_staged(
                engine.client,
                info["path"],
                limit_s=limit,
                call_s=self._pace.floor_s,
                must_be_whole=not durable,
            )
        for skipped in answer.get("skipped", ()):
            _log.warning("%s skipped version %d: %s", engine.name, skipped["version"], skipped["reason"])
            self._events.emit("engine.version_skipped", engine=engine.name, **skipped)
            if not durable and skipped["version"] == asked:
                continue  # it is tried again
            self.unloadable[engine] = max(
                self.unloadable.get(engine, (-1, "")), (skipped["version"], skipped["reason"])
            )
        version = answer.get("version", version)
        self.reading.discard(engine)
        engine.begin_exchange()
        self._exchanging[engine] = paused = time.monotonic()
        await exchange(engine.client, info, version, pause=self._pause, in_place=in_place, limit_s=limit)
        seconds = time.monotonic() - paused
        self._longest_s = max(self._longest_s or 0.0, seconds)
        return version, seconds if self._pause else 0.0

    async def could_not_pull(self, engine: Engine, version: int, error: EngineError) -> bool:
        """Return whether a healthy engine could not pull a version that was only announced; it keeps what it serves."""
        if engine not in self.reading or self.undurable.get(engine) != version or engine.away:
            return False
        if not await engine.client.healthy(timeout_s=HEALTH_S):
            return False
        _log.warning("%s continues with version %d: %s", engine.name, engine.version, error)
        self._events.emit("engine.version_skipped", engine=engine.name, version=version, reason=str(error))
        return True

    async def share_hangs(self, engine: Engine, version: int, error: EngineError, elsewhere: int) -> bool:
        """Return whether reading timed out because the shared filesystem hangs; pause before the next attempt.

        This is assumed where no other engine has read this version (the newest is ``elsewhere``) and the engine is
        healthy; it keeps its version.
        """
        reading = engine in self.reading and elsewhere < version
        if not reading or engine.version < 0 or engine.away or not await only_reads(engine.client, error):
            return False
        _log.warning("%s continues with version %d and tries again: %s", engine.name, engine.version, error)
        self._events.emit("engine.read_timed_out", engine=engine.name, version=version, why=str(error))
        await asyncio.sleep(_RETRY_S)
        return True
