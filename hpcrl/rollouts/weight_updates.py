"""Brings engines to the newest published version, each at its own pace, without ending what is in flight."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from hpcrl.errors import DeadlineError, PeerLostError
from hpcrl.rollouts.engine_client import EngineError
from hpcrl.rollouts.engine_pool import Engine, EnginePool
from hpcrl.runs.events import EventWriter
from hpcrl.weights import HandoffStore

__all__ = ["WeightUpdater"]

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

_LIST_S = 1.0
_ATTEMPTS = 3
_RETRY_S = 1.0
_RESUME_AT_EXIT_S = 1.0


class WeightUpdater:
    """Watches the hand-off store and updates engines; the only collector of old versions.

    The first version is not looked for but awaited: before the trainer has named one, the store may hold
    versions of a past that a resume is about to withdraw.
    """

    def __init__(
        self,
        *,
        pool: EnginePool,
        store: HandoffStore,
        events: EventWriter,
        pause: bool,
        keep_last: int,
        timeout_s: float,
        on_served: Callable[[int], None],
    ) -> None:
        """Remember settings; nothing is sent before `run`.

        Parameters
        ----------
        pause:
            Freeze requests while weights change.
        keep_last:
            Versions that the collector leaves.
        timeout_s:
            Longest time for one engine to load one version.
        on_served:
            Called with a version when all engines serve it.
        """
        self._pool, self._store, self._events, self._pause = pool, store, events, pause
        self._keep_last, self._timeout_s, self._on_served = keep_last, timeout_s, on_served
        self._target: int | None = None
        self._loading: dict[str, int] = {}
        self._holds = 0
        self._changed = asyncio.Condition()
        self._collecting = asyncio.Lock()

    @property
    def announced(self) -> int | None:
        """Newest version known to be published by this attempt's trainer; None before the first."""
        return self._target

    async def announce(self, version: int) -> None:
        """``version`` is in the store."""
        async with self._changed:
            if self._target is None or version > self._target:
                self._target = version
                self._changed.notify_all()

    async def wait_announced(self, *, timeout_s: float) -> int:
        """Wait for the first version (DeadlineError where none comes)."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self._target is not None)
        except TimeoutError:
            raise DeadlineError(f"the trainer published no weights within {timeout_s:g} s") from None
        assert self._target is not None
        return self._target

    async def wait_served(self, version: int) -> None:
        """Wait until all engines serve ``version`` or a newer one. Bounded by the time limits of updates."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._pool.version >= version)

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """No update begins inside; one that runs is waited for. For evaluations of exactly one version."""
        async with self._changed:
            self._holds += 1
            await self._changed.wait_for(lambda: not self._loading)
        try:
            yield
        finally:
            async with self._changed:
                self._holds -= 1
                self._changed.notify_all()

    async def run(self) -> None:
        """Look for versions and update engines, for ever.

        Raises
        ------
        PeerLostError
            An engine did not take a version after several attempts.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self._look_for_versions())
            for engine in self._pool.engines:
                group.create_task(self._follow(engine))

    async def _look_for_versions(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._target is not None)
        while True:
            await asyncio.sleep(_LIST_S)
            # in a thread: a listing on a shared filesystem may take its time
            newest = await asyncio.to_thread(self._store.newest)
            if newest is not None:
                await self.announce(newest)

    def _due(self, engine: Engine) -> bool:
        return self._target is not None and self._target > engine.version and not self._holds

    async def _follow(self, engine: Engine) -> None:
        """Keep one engine up to date."""
        initialised = False
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._due(engine))
                assert self._target is not None
                # of several versions that wait, the newest
                version = self._loading[engine.name] = self._target
            try:
                if not initialised:
                    await self._persist(engine, "initialise weight transfer", self._initialise)
                    initialised = True
                await self._update(engine, version)
            finally:
                async with self._changed:
                    del self._loading[engine.name]
                    self._changed.notify_all()
            if self._pool.version == version:
                self._on_served(version)
                await self._collect()

    async def _update(self, engine: Engine, version: int) -> None:
        started = time.monotonic()
        engine.open_for_new.clear()
        try:
            pause_s = await self._persist(engine, f"load version {version}", lambda engine: self._load(engine, version))
            engine.version = version
        finally:
            engine.open_for_new.set()
        seconds = time.monotonic() - started
        self._events.emit(
            "engine.weights_updated", engine=engine.name, version=version, seconds=seconds, pause_s=pause_s
        )

    async def _persist(self, engine: Engine, what: str, call: Callable[[Engine], Awaitable[_T]]) -> _T:
        """Try ``call`` several times; then the engine counts as lost."""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return await call(engine)
            except EngineError as error:
                last = error
                _log.warning("%s: attempt %d to %s failed: %s", engine.name, attempt, what, error)
                await asyncio.sleep(_RETRY_S * attempt)
        raise PeerLostError(f"{engine.name} ({engine.client.url}) could not {what} in {_ATTEMPTS} attempts: {last}")

    async def _initialise(self, engine: Engine) -> None:
        await engine.client.control("/init_weight_transfer_engine", {"init_info": {}}, timeout_s=self._timeout_s)

    async def _load(self, engine: Engine, version: int) -> float:
        """One attempt; returns the seconds that requests were frozen."""
        control, limit = engine.client.control, self._timeout_s
        paused = time.monotonic()
        resume_limit = limit
        try:
            if self._pause:
                # by default vLLM clears its cache here, which recomputes the KV of requests in flight
                await control("/pause?mode=keep&clear_cache=false", timeout_s=limit)
            await control("/start_weight_update", timeout_s=limit)
            update = {"update_info": {"path": str(self._store.path_of(version))}}
            await control("/update_weights", update, timeout_s=limit)
            await control("/finish_weight_update", {"weight_version": str(version)}, timeout_s=limit)
        except asyncio.CancelledError:
            resume_limit = _RESUME_AT_EXIT_S
            raise
        finally:
            # whatever happened: an engine that stays paused answers nobody and looks healthy
            if self._pause:
                await control("/resume", timeout_s=resume_limit)
        return time.monotonic() - paused if self._pause else 0.0

    async def _collect(self) -> None:
        async with self._collecting:
            in_use = {engine.version for engine in self._pool.engines} | set(self._loading.values())
            await asyncio.to_thread(self._store.collect, keep_last=self._keep_last, in_use=in_use)
