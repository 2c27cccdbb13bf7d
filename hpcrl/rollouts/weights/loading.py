"""One engine loads one version from the store: it reads beside its requests, then exchanges weights."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from typing import Any

from hpcrl.rollouts.engines.engine import Engine
from hpcrl.rollouts.engines.update_answer import check_update_answer
from hpcrl.rollouts.weights.exchange import begin, bytes_of, exchange, wait_staged
from hpcrl.runs.events import EventWriter
from hpcrl.weights import HandoffStore
from hpcrl.weights.read.share import Pace
from hpcrl.weights.session import SESSION

__all__ = ["VersionLoader"]

_log = logging.getLogger(__name__)

_USUAL_FACTOR = 5.0
_USUAL_FLOOR_S = 10.0
"""An exchange of weights hangs after so many times the longest so far, but not before these seconds."""


class VersionLoader:
    """Lets engines load versions.

    Attributes
    ----------
    reading:
        Engines that read a version now, and do not exchange weights yet.
    unloadable:
        The newest version that an engine could not load, and why.
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
        """Remember settings: those of `hpcrl.rollouts.weights.updates.WeightUpdater`, and what `load` asks."""
        self._store, self._events, self._pace = store, events, pace
        self._pause, self._attempt, self._may_fall_back = pause, attempt, may_fall_back
        self.reading: set[Engine] = set()
        self.unloadable: dict[Engine, tuple[int, str]] = {}
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

    async def load(self, engine: Engine, version: int) -> tuple[int, float]:
        """Make one attempt. The version is read and verified while the engine generates; only then requests are frozen.

        Where this one cannot be loaded, and ``may_fall_back`` says so, an engine that comes late takes the newest that
        can be, and one that serves an older version goes on with it; the next version is tried again.

        Returns
        -------
        tuple
            The version that is served now, and the seconds that requests were frozen.

        Raises
        ------
        EngineError
            The engine does not take it.
        """
        control = engine.client.control
        limit = self._pace.limit_s(await asyncio.to_thread(bytes_of, self._store, version))
        info: dict[str, Any] = {"path": str(self._store.path_of(version)), "fallback": self._may_fall_back()}
        self.reading.add(engine)
        # numbers grow from one process of the orchestrator to the next, too
        info[SESSION] = [self._attempt, time.time_ns()]
        await begin(engine.client, limit_s=limit, session=info[SESSION])
        answer = await control("/update_weights", {"update_info": {**info, "stage": True}}, timeout_s=limit)
        answer = check_update_answer(engine.name, answer, asked=version)
        in_place = "version" not in answer
        if in_place:  # vLLM has only begun to read
            await wait_staged(engine.client, info["path"], limit_s=limit, call_s=self._pace.floor_s)
        for skipped in answer.get("skipped", ()):
            _log.warning("%s skipped version %d: %s", engine.name, skipped["version"], skipped["reason"])
            self._events.emit("engine.version_skipped", engine=engine.name, **skipped)
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
