"""Brings engines to the newest published version, each at its own pace, without ending what is in flight."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from hpcrl.errors import DeadlineError, HandoffError, PeerLostError
from hpcrl.rollouts.engines.client import HEALTH_S, EngineError
from hpcrl.rollouts.engines.engine import Engine
from hpcrl.rollouts.engines.pool import EnginePool
from hpcrl.rollouts.weights.canary import CanaryCheck
from hpcrl.rollouts.weights.loading import VersionLoader
from hpcrl.rollouts.weights.proof import ProofCheck, WrongWeightsError
from hpcrl.rollouts.weights.registration import ReaderRegistration
from hpcrl.rollouts.weights.undurable import UndurableVersions
from hpcrl.rollouts.weights.update_sources import UpdateSources
from hpcrl.runs.events import EventWriter
from hpcrl.weights import HandoffStore
from hpcrl.weights.lifetime.collector import Collector
from hpcrl.weights.read.share import Pace

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

_LIST_S = 1.0
_ATTEMPTS = 3
_RETRY_S = 1.0
_PROOF_S = 30.0
"""Timeout in seconds of a proof that an engine runs the weights of a version; one that takes longer shows nothing."""


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
        registration: ReaderRegistration,
        collector: Collector,
        pace: Pace,
        on_served: Callable[[int], None],
        on_stale: Callable[[Engine, str], None] = lambda engine, why: None,
        on_wrong: Callable[[Engine, str], None] | None = None,
        choose: Callable[[int], int] | None = None,
        attempt: int = 0,
        sources: UpdateSources | None = None,
    ) -> None:
        """Remember settings; nothing is sent before `run`.

        Parameters
        ----------
        pause:
            Freeze requests while weights change.
        registration:
            Describes to engines how they read versions.
        collector:
            Removes versions that are not needed any more.
        pace:
            Time limit of one engine for loading one version.
        on_served:
            Called with a version when all engines that are not away serve it.
        on_stale:
            Called with an engine that answers and does not accept a version: it should be restarted.
        on_wrong:
            The same for one that computes with other weights than it reports. None: ``on_stale``.
        choose:
            Returns the version that engines should serve, given the newest; when its result changes, the pool is
            notified (`EnginePool.notify`). None: the newest, or an older one where that cannot be loaded.
        attempt:
            Attempt of the run, as the owner of weight-update sessions.
        sources:
            Counts by which way engines read versions. None: nothing counts.
        """
        self.sources = sources
        self._pool, self._store, self._events = pool, store, events
        self._registration, self._collector, self._pace, self._on_served = registration, collector, pace, on_served
        self._on_stale, self._choose = on_stale, choose
        self._on_wrong = on_wrong or on_stale
        self._loader = VersionLoader(
            store, events, pace, pause=pause, attempt=attempt, may_fall_back=self._may_fall_back
        )
        self.undurable = UndurableVersions(store)
        self._canary = CanaryCheck(store, events, call_s=pace.floor_s)
        self._proofs = ProofCheck(store, events, call_s=pace.floor_s, limit_s=min(_PROOF_S, pace.floor_s))
        self._target: int | None = None
        self._loading: dict[Engine, int] = {}
        self._following: dict[Engine, asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None
        self._holds, self._held_version, self._served = 0, -1, -1
        self._strikes: dict[tuple[Engine, int], int] = {}
        self._changed = pool.changed
        self._collect_due = asyncio.Event()

    @property
    def announced(self) -> int | None:
        """Return the newest version known to be published by this attempt's trainer; None before the first."""
        return self._target

    async def announce(self, version: int) -> None:
        """Note that engines can have ``version``: it is durable, or its ranks serve it."""
        async with self._changed:
            if self._target is None or version > self._target:
                self._target = self._pool.newest = version
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
        """Wait until all engines serve ``version`` or a newer one. Bounded by the time limits of updates.

        Raises
        ------
        PeerLostError
            An engine cannot load it.
        """

        def stuck() -> str:
            return self._loader.stuck_before(self._pool.engines, version)

        async with self._changed:
            await self._changed.wait_for(lambda: self._pool.version >= version or stuck() != "")
        if why := stuck():
            raise PeerLostError(why)

    def _others_serve(self, engine: Engine) -> int:
        """Return the newest version that another engine serves; -1 where none serves any."""
        return max((other.version for other in self._pool.engines if other is not engine), default=-1)

    def exchanging(self, engine: Engine) -> bool:
        """Return whether weights of an engine are being changed, for no longer than usual: it samples nothing then."""
        return self._loader.exchanging(engine)

    def loading(self, engine: Engine) -> int | None:
        """Return the version that an engine is loading now; None where it loads none."""
        return self._loading.get(engine)

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Begin no update inside the context; wait for a running one first. For evaluations of exactly one version."""
        async with self._changed:
            self._holds += 1
            await self._changed.wait_for(lambda: not self._loading)
            if self._holds == 1:
                self._held_version = self._pool.version
        try:
            yield
        finally:
            async with self._changed:
                self._holds -= 1
                self._changed.notify_all()

    async def run(self) -> None:
        """Look for versions and update engines; never return.

        Raises
        ------
        PeerLostError
            An engine did not accept a version after several attempts, and was not restarted.
        HandoffError
            An engine computes without the adapter that it has loaded.
        """
        async with asyncio.TaskGroup() as self._group:
            self._group.create_task(self._look_for_versions())
            self._group.create_task(self._report_served())
            self._group.create_task(self._collect())
            self._group.create_task(self._proofs.watch(self._pool.engines, self._loading, self._wrong))
            for engine in self._pool.engines:
                self.follow(engine)

    def follow(self, engine: Engine) -> None:
        """Keep an engine up to date from now on; before `run` it is enough that the pool has it."""
        if self._group is not None:
            self._following[engine] = self._group.create_task(self._follow(engine))

    def forget(self, engine: Engine) -> None:
        """Stop following an engine that has left the pool."""
        if (task := self._following.pop(engine, None)) is not None:
            task.cancel()

    async def _look_for_versions(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._target is not None)
        while True:
            await asyncio.sleep(_LIST_S)
            # in a thread: a listing on a shared filesystem may take long
            try:
                newest = await asyncio.to_thread(self.undurable.look)
            except OSError as error:
                _log.warning("the published versions cannot be listed now: %s", error)
                continue
            if newest is not None:
                await self.announce(newest)
            if self.undurable.end_waits():
                await self._pool.notify()

    async def _report_served(self) -> None:
        """Report the version that all engines serve, also after the slowest of them went away."""
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._pool.version > self._served)
                self._served = self._pool.version
            self._on_served(self._served)
            self._collect_due.set()

    def _due(self, engine: Engine) -> int | None:
        """Return the version that an engine must load now; None where it needs none, or is away."""
        if self._target is None or engine.away:
            return None
        if self._holds:
            # an engine that returns during an evaluation loads the evaluated version: it may be the only engine
            return self._held_version if engine.version < 0 <= self._held_version else None
        target = self.undurable.choose(engine, self._target) if self._choose is None else self._choose(self._target)
        # a version that this engine could not load is tried again only where it has none, or another engine serves it
        tried = self._loader.unloadable.get(engine, (-1, ""))[0]
        if engine.version < 0 or tried <= self._others_serve(engine):
            tried = -1
        return target if target > max(engine.version, tried) else None

    async def _follow(self, engine: Engine) -> None:
        """Keep one engine up to date, through all of its restarts."""
        initialised: int | None = None
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._due(engine) is not None)
                version = self._due(engine)
                assert version is not None
                # marked under the lock that `held` takes: an evaluation then waits for this update, or it sees the hold
                self._loading[engine] = version
            try:
                await self._pool.check_weights(engine)
                incarnation = engine.incarnation
                if engine.away:
                    continue
                # a new process has lost its registration
                if initialised != incarnation:
                    await self._persist(engine, "initialise weight transfer", lambda: self._initialise(engine))
                    initialised = incarnation
                await self._update(engine, version)
            except WrongWeightsError as error:
                await self._wrong(engine, incarnation, error)
            except EngineError as error:
                if await self._loader.could_not_pull(engine, version, error):
                    self.undurable.wait(engine, version)
                    await self._ways(engine, version)
                elif not await self._loader.share_hangs(engine, version, error, self._others_serve(engine)):
                    await self._unfit(engine, incarnation, error)
            finally:
                self._loader.reading.discard(engine)
                async with self._changed:
                    del self._loading[engine]
                    self._changed.notify_all()

    async def _wrong(self, engine: Engine, incarnation: int, error: WrongWeightsError) -> None:
        """Lose an engine that computes with other weights than it reports, so that it is restarted."""
        if engine.incarnation == incarnation:
            self._on_wrong(engine, str(error))
            await self._pool.lose(engine, str(error))

    async def _prove(self, engine: Engine, version: int, before: int) -> bool:
        """See `ProofCheck.check`."""
        return await self._proofs.check(engine, version, before)

    async def _unfit(self, engine: Engine, incarnation: int, error: EngineError) -> None:
        """Lose an engine that failed during an update; it serves nothing until it has the version.

        The run continues while another engine serves; else the second failure raises PeerLostError.
        """
        if engine.incarnation != incarnation:
            return
        late = error.timed_out and len(engine.client.servers) == 1
        if not (error.unreachable or late) or await self._waits_for_ever(engine, error):
            strikes = self._strikes[engine, incarnation] = self._strikes.get((engine, incarnation), 0) + 1
            if strikes > 1 and self._others_serve(engine) < 0:
                raise PeerLostError(f"{engine.name} ({engine.client.url}) {error}")
            self._on_stale(engine, str(error))
            # `lose` begins a new incarnation: the count continues there, because the process may still be the same
            self._strikes[engine, incarnation + 1] = strikes
        await self._pool.lose(engine, str(error))

    async def _waits_for_ever(self, engine: Engine, error: EngineError) -> bool:
        """Return whether ranks of a wide replica deadlock in a call while all are healthy; only a restart ends that."""
        if not error.timed_out or len(engine.client.servers) == 1:
            return False
        return await engine.client.problem(timeout_s=HEALTH_S) is None

    async def _update(self, engine: Engine, version: int) -> None:
        started, incarnation, before = time.monotonic(), engine.incarnation, engine.version
        try:
            await self._canary.before(engine, version)
            asked = version
            version, pause_s = await self._persist(
                engine, f"load version {version}", lambda: self._catch_up(engine, version)
            )
            if version == before and asked == self._loader.undurable.get(engine):
                await self._ways(engine, asked)  # it keeps what it has, which may have no other place any more
                return
            await self._canary.after(engine, version)
            proved = await engine.call(self._prove(engine, version, before))
            if engine.incarnation == incarnation:
                engine.serve(version, proved_s=started)
        finally:
            self._loader.end_exchange(engine)
        await self._pool.notify()
        seconds = time.monotonic() - started
        ways = await self._ways(engine, version)
        self._events.emit(
            "engine.weights_updated",
            engine=engine.name,
            version=version,
            seconds=seconds,
            pause_s=pause_s,
            proved=proved,
            **ways,
        )

    async def _ways(self, engine: Engine, version: int) -> dict[str, float]:
        """Return by which ways an engine got bytes since the last call, where that is counted."""
        return {} if self.sources is None else await self.sources.after(engine.name, version)

    async def _persist(self, engine: Engine, what: str, call: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Try ``call`` several times, for as long as the engine does not go away (EngineError then)."""
        incarnation = engine.incarnation
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return await engine.call(call())
            except EngineError as error:
                last = error
                # an engine that did not answer may be a new process when it answers, which must be initialised first
                if engine.incarnation != incarnation or error.unreachable or error.timed_out:
                    raise
                _log.warning("%s: attempt %d to %s failed: %s", engine.name, attempt, what, error)
                await asyncio.sleep(_RETRY_S * attempt)
        raise EngineError(f"could not {what} in {_ATTEMPTS} attempts: {last}")

    async def _initialise(self, engine: Engine) -> None:
        await self._registration.register(engine.client, limit_s=self._pace.floor_s)

    async def _catch_up(self, engine: Engine, version: int) -> tuple[int, float]:
        """Load as `_load` does, but do not leave the engine behind a version that another engine could load.

        A version that others loaded while this engine loaded ``version`` is its next version.
        """
        loaded, pause_s = await self._load(engine, version)
        if loaded < version == self._loader.undurable.get(engine):
            self.undurable.wait(engine, version)
            return loaded, pause_s
        others = self._others_serve(engine)
        if loaded < min(version, others):
            reason = self._loader.unloadable.get(engine, (-1, "it did not say why"))[1]
            raise EngineError(f"it has version {loaded}, others serve {others}: {reason}")
        return loaded, pause_s

    async def _load(self, engine: Engine, version: int) -> tuple[int, float]:
        """See `VersionLoader.load`."""
        return await self._loader.load(engine, version)

    def _may_fall_back(self) -> bool:
        """Return whether engines may take an older version; not in an exact evaluation, or a run that is replayed."""
        return not self._holds and self._choose is None

    async def _collect(self) -> None:
        """Remove old versions each time a new one is served everywhere; never return. Updates do not wait for it."""
        while True:
            await self._collect_due.wait()
            self._collect_due.clear()
            in_use = {engine.version for engine in self._pool.engines} | set(self._loading.values())
            in_use |= {self._held_version} if self._holds else set()
            if self._choose is not None:  # engines may still be asked to load each of these
                in_use |= set(range(self._served, (self._target or 0) + 1))
            try:
                report = await asyncio.to_thread(self._collector.collect, in_use)
            except (HandoffError, OSError) as error:
                # only space is lost, until the next version
                _log.warning("old versions were not removed: %s", error)
                continue
            if report.removed or report.restored:
                self._events.emit("weights.collected", removed=report.removed, restored=report.restored)
