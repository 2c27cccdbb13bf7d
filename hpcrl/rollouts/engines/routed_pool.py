"""Pool of engines behind a router, which chooses the engine of each request among those that the pool permits.

An engine is added to the router when it serves a version, and removed when it is gone, or lags behind the others. So a
restarted engine gets no requests before it has the newest weights, and a restarted router gets its engines again.
Weights are updated at the engines themselves. Of a replica with several servers the router gets all, or none.

Where the engine of a request is unknown, so is the version that will compute its prompt. New rollouts therefore wait
until all engines of the router serve one version and none is about to change: all of them then have the same salt.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import Unpack

import msgspec

from hpcrl.rollouts.engines import pool as engine_pool
from hpcrl.rollouts.engines.client import EngineClient, SamplingParams
from hpcrl.rollouts.engines.engine import Engine
from hpcrl.rollouts.engines.errors import EngineError, EngineProtocolError
from hpcrl.rollouts.engines.pool import EnginePool, PoolLimits, PoolSettings
from hpcrl.rollouts.engines.router_client import RouterClient, Worker
from hpcrl.rollouts.engines.sessions import EngineSession
from hpcrl.runs.events import EventWriter

_log = logging.getLogger(__name__)

_ADMIN_S = 5.0
_ADD_S = 15.0
"""Timeout in seconds for adding an engine; the router probes its health first."""
_PROBES = 4
"""Number of requests by which an engine shows that its answers are usable."""
_PROBE_TOKEN = 1
_BEHIND_S = 5.0
"""Time in seconds for which an engine that is not being updated may serve an older version than another one, while new
rollouts wait for it. After that the router continues without it: an engine that could not load a version would block
new rollouts until the next version."""


def make_pool(
    clients: Sequence[EngineClient],
    router: RouterClient | None,
    *,
    events: EventWriter,
    routed: Callable[..., RoutedPool] | None = None,
    **settings: Unpack[PoolLimits],
) -> EnginePool:
    """Return the pool of engines of a run, behind its router where it has one; changes are written as events.

    Parameters
    ----------
    routed:
        Makes the pool behind a router; None: `RoutedPool`.
    settings:
        Settings of `EnginePool`.
    """

    def engine_changed(away: bool, engine: Engine, why: str) -> None:
        if away:
            events.emit("engine.away", engine=engine.name, why=why)
        else:
            events.emit("engine.back", engine=engine.name)

    if router is None:
        return EnginePool(clients, on_change=engine_changed, **settings)
    return (routed or RoutedPool)(clients, router=router, on_change=engine_changed, events=events, **settings)


class RoutedPoolSettings(PoolSettings):
    """Keyword arguments of `RoutedPool`."""

    router: RouterClient
    events: EventWriter


class RoutedPool(EnginePool):
    """Engines behind a router.

    Attributes
    ----------
    front:
        The router, as the one engine that sessions know: its version is the lowest that a request may meet.
    """

    def __init__(
        self,
        clients: Sequence[EngineClient],
        *,
        router: RouterClient,
        events: EventWriter,
        **settings: Unpack[PoolSettings],
    ) -> None:
        """Take the engines; nothing is sent.

        Parameters
        ----------
        events:
            Writer of events about the router and its engines.
        settings:
            Settings of `EnginePool`.
        """
        super().__init__(clients, **settings)
        self.front = Engine(router)
        self._router, self._events = router, events
        router.behind = lambda: [engine.client for engine in self.engines]
        self._routed: set[Engine] = set()
        self._unhealthy: set[str] = set()
        self._behind_since: dict[Engine, float] = {}
        self._due = asyncio.Event()

    def least_loaded(self, failed: Engine | None) -> Engine:
        """Return the router, which chooses among its engines."""
        return self.front

    async def wait_open(self, session: EngineSession) -> Engine:
        """Wait until all engines of the router serve one version that is not about to change; return the router."""
        while True:
            await self.settle(session)
            if self._one_version():
                return self.front
            async with self.changed:
                await self.changed.wait_for(lambda: self._one_version() or not self.front.serving)

    async def lose(self, engine: Engine, why: str) -> None:
        """Lose an engine (see `EnginePool.lose`).

        The source of an answer with wrong weights is unknown, so all engines are probed.
        """
        if engine is self.front:
            self._suspect(engine)
        else:
            await super().lose(engine, why)

    async def _give_up(self, engine: Engine, why: str) -> None:
        """Give up an engine (see `EnginePool._give_up`).

        The source of unusable answers is unknown, so each engine is asked.
        """
        if engine is not self.front:
            await super()._give_up(engine, why)
            return
        asked = self._routed_now()
        problems = await asyncio.gather(*(self._unusable_answer_of(candidate) for candidate in asked))
        broken = [(candidate, problem) for candidate, problem in zip(asked, problems, strict=True) if problem]
        for candidate, problem in broken:
            await super()._give_up(candidate, f"gives unusable answers: {problem}")
        if not broken:
            self._on_unusable(self.front, why)

    async def _unusable_answer_of(self, engine: Engine) -> EngineProtocolError | None:
        """Ask each server of an engine for some tokens; return the problem of its answers, None without one.

        Every other answer is asked for in parts: an engine may give these alone in a way that cannot be used.
        """
        params = SamplingParams(temperature=1.0, max_tokens=1, seed=0, stop_token_ids=[])
        for server in engine.client.servers:
            for seed in range(_PROBES):
                try:
                    await server.generate(
                        [_PROBE_TOKEN],
                        msgspec.structs.replace(params, seed=seed, stream_interval=1 if seed % 2 else msgspec.UNSET),
                        cache_salt="probe",
                        session_id="probe",
                        timeout_s=_ADD_S,
                    )
                except EngineProtocolError as error:
                    return error
                except EngineError:
                    break  # whether it answers at all is checked elsewhere
        return None

    async def notify(self) -> None:
        """See `EnginePool.notify`."""
        self._refresh()
        await super().notify()
        self._due.set()

    async def watch(self) -> None:
        """See `EnginePool.watch`; keeps the router's engines right as well."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(super().watch())
            tasks.create_task(self._tend())

    @property
    def router_answers(self) -> bool:
        """Return whether the router answers (see `EnginePool.router_answers`)."""
        return not self.front.away

    def routed(self, engine: Engine) -> bool:
        """See `EnginePool.routed`; also by the router's own health checks."""
        return engine in self._routed and not self._unhealthy.intersection(_urls(engine))

    # -- what the router stands for

    def _behind(self, engine: Engine) -> list[Engine]:
        return list(self._routed)

    def _someone_serves(self) -> bool:
        return self.front.serving

    def _suspect(self, engine: Engine) -> None:
        super()._suspect(engine)
        self._due.set()

    def _routed_now(self) -> list[Engine]:
        return [engine for engine in self.engines if engine in self._routed and engine.serving]

    def _refresh(self) -> None:
        self.front.follow(min((engine.version for engine in self._routed_now()), default=-1))

    def _one_version(self) -> bool:
        self._refresh()
        routed = self._routed_now()
        return len({engine.version for engine in routed}) == 1 and all(e.open_for_new for e in routed)

    # -- keeping the router right

    async def _tend(self) -> None:
        """Reconcile with the router after each change and at intervals; never return.

        The supervisor restarts a dead router.
        """
        while True:
            self._due.clear()
            try:
                changed = await self._reconcile()
            except EngineError as error:
                if changed := self.front.absent():
                    _log.warning("the router is unreachable: %s", error)
                    self._events.emit("router.away", why=str(error))
            else:
                if self.front.answered():
                    changed = True
                    self._events.emit("router.back")
                elif not self._some_serve.is_set():
                    changed = True
            if changed:
                await self.notify()
                self._due.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(engine_pool.WATCH_S):
                    await self._due.wait()
                await asyncio.sleep(0.05)  # many requests may fail at once

    async def _reconcile(self) -> bool:
        """Set the engines that the router may choose from; return whether they changed.

        Raises
        ------
        EngineError
            It does not answer.
        """
        known = await self._router.workers(timeout_s=_ADMIN_S)
        wanted = self._eligible()
        for url in known.keys() - {url for engine in wanted for url in _urls(engine)}:
            await self._router.remove(url, timeout_s=_ADMIN_S)
        routed = {engine for engine in wanted if await self._enter(engine, known)}
        for engine in self._routed - routed:
            self._events.emit("router.engine_removed", engine=engine.name)
        for engine in routed - self._routed:
            self._events.emit("router.engine_added", engine=engine.name)
        changed = routed != self._routed
        self._routed = routed
        self._note_loads(known)
        return changed

    async def _enter(self, engine: Engine, known: Collection[str]) -> bool:
        """Add an engine to the router; return whether the router now has all of its servers.

        Where the router rejects one server of an engine, the others are removed from it again.
        """
        taken = [server for server in engine.client.servers if server.url in known]
        for server in engine.client.servers:
            if server.url in known:
                continue
            if not await self._add(server):
                for other in taken:
                    await self._router.remove(other.url, timeout_s=_ADMIN_S)
                return False
            taken.append(server)
        return True

    async def _add(self, server: EngineClient) -> bool:
        """Return whether the router accepted the server.

        The router probes the engine first, which may have gone away in the meantime.

        Raises
        ------
        EngineError
            The router refuses connections.
        """
        try:
            await self._router.add(server.url, timeout_s=_ADD_S)
        except EngineError as error:
            if error.refused:
                raise
            _log.warning("the router does not accept %s: %s", server.name, error)
            return False
        return True

    def _eligible(self) -> list[Engine]:
        """Return the engines that serve, sample, and do not lag behind in versions."""
        now = time.monotonic()
        serving = [engine for engine in self.engines if engine.serving]
        serving = [engine for engine in serving if not engine.stuck] or serving
        newest = max((engine.version for engine in serving), default=-1)
        late = {e for e in serving if e.version < newest and e.open_for_new}
        self._behind_since = {engine: self._behind_since.get(engine, now) for engine in late}
        return [engine for engine in serving if now - self._behind_since.get(engine, now) < _BEHIND_S]

    def _note_loads(self, known: dict[str, Worker]) -> None:
        self._unhealthy = {url for url, worker in known.items() if not worker.is_healthy}
        for engine in self.engines:
            engine.measured(sum(known[url].load for url in _urls(engine) if url in known))


def _urls(engine: Engine) -> list[str]:
    return [server.url for server in engine.client.servers]
