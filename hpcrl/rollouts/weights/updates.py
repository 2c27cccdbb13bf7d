"""Brings engines to the newest published version, each at its own pace, without ending what is in flight."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from hpcrl.errors import DeadlineError, HandoffError, PeerLostError
from hpcrl.rollouts.engines.client import EngineError
from hpcrl.rollouts.engines.engine import Engine
from hpcrl.rollouts.engines.pool import EnginePool
from hpcrl.rollouts.weights.canary import CanaryCheck
from hpcrl.rollouts.weights.exchange import only_reads
from hpcrl.rollouts.weights.loading import VersionLoader
from hpcrl.rollouts.weights.proof import ProofCheck, WrongWeightsError
from hpcrl.rollouts.weights.registration import ReaderRegistration
from hpcrl.runs.events import EventWriter
from hpcrl.weights import HandoffStore
from hpcrl.weights.lifetime.collector import Collector
from hpcrl.weights.read.share import Pace

__all__ = ["WeightUpdater"]

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

_LIST_S = 1.0
_ATTEMPTS = 3
_RETRY_S = 1.0
_HEALTH_S = 5.0
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
    ) -> None:
        """Remember settings; nothing is sent before `run`.

        Parameters
        ----------
        pause:
            Freeze requests while weights change.
        registration:
            Tells engines how they read versions.
        collector:
            Removes what nobody needs any more.
        pace:
            Longest time for one engine to load one version.
        on_served:
            Called with a version when all engines serve it that are there.
        on_stale:
            Called with an engine that answers and does not take a version: somebody should start it anew.
        on_wrong:
            The same of one that computes with other weights than it says. None: ``on_stale``.
        choose:
            Says which version engines should serve, given the newest; when it says another, the pool is notified
            (`EnginePool.notify`). None: the newest, or an older one where that cannot be loaded.
        attempt:
            Of the run, as the owner of weight-update sessions.
        """
        self._pool, self._store, self._events = pool, store, events
        self._registration, self._collector, self._pace, self._on_served = registration, collector, pace, on_served
        self._on_stale, self._choose = on_stale, choose
        self._on_wrong = on_wrong or on_stale
        self._loader = VersionLoader(
            store, events, pace, pause=pause, attempt=attempt, may_fall_back=self._may_fall_back
        )
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
        """Newest version known to be published by this attempt's trainer; None before the first."""
        return self._target

    async def announce(self, version: int) -> None:
        """``version`` is in the store."""
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
        async with self._changed:
            await self._changed.wait_for(lambda: self._pool.version >= version or self._stuck_before(version) != "")
        if stuck := self._stuck_before(version):
            raise PeerLostError(stuck)

    def _stuck_before(self, version: int) -> str:
        """Why none of the engines can load the newest version, so that waiting for ``version`` is in vain."""
        there = [engine for engine in self._pool.engines if not engine.away]
        stuck = [e for e in there if 0 <= e.version < version <= self._loader.unloadable.get(e, (-1, ""))[0]]
        if len(stuck) < len(there):
            return ""
        found = [(engine.name, *self._loader.unloadable[engine]) for engine in stuck]
        return "; ".join(f"{name} cannot load version {newest}: {why}" for name, newest, why in found)

    def _others_serve(self, engine: Engine) -> int:
        """Newest version that another engine serves; -1 where none serves any."""
        return max((other.version for other in self._pool.engines if other is not engine), default=-1)

    def exchanging(self, engine: Engine) -> bool:
        """Whether its weights are being changed, for no longer than that may take: nobody can expect tokens of it."""
        return self._loader.exchanging(engine)

    def loading(self, engine: Engine) -> int | None:
        """The version that an engine is being brought to now."""
        return self._loading.get(engine)

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """No update begins inside; one that runs is waited for. For evaluations of exactly one version."""
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
        """Look for versions and update engines, for ever.

        Raises
        ------
        PeerLostError
            An engine did not take a version after several attempts, and nobody started it anew.
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
        """An engine has left the pool."""
        if (task := self._following.pop(engine, None)) is not None:
            task.cancel()

    async def _look_for_versions(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._target is not None)
        while True:
            await asyncio.sleep(_LIST_S)
            # in a thread: a listing on a shared filesystem may take its time
            try:
                newest = await asyncio.to_thread(self._store.newest)
            except OSError as error:
                _log.warning("which versions there are cannot be seen now: %s", error)
                continue
            if newest is not None:
                await self.announce(newest)

    async def _report_served(self) -> None:
        """Say which version all engines serve; also when the slowest of them went away."""
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._pool.version > self._served)
                self._served = self._pool.version
            self._on_served(self._served)
            self._collect_due.set()

    def _due(self, engine: Engine) -> int | None:
        """The version that an engine must load now; None where it needs none, or is not there."""
        if self._target is None or engine.away:
            return None
        if self._holds:
            # who comes back during an evaluation serves what is evaluated: it may be the only engine
            return self._held_version if engine.version < 0 <= self._held_version else None
        target = self._target if self._choose is None else self._choose(self._target)
        # a version that no engine could load is not tried again, unless this one has none at all
        tried = self._loader.unloadable.get(engine, (-1, ""))[0]
        if engine.version < 0 or tried <= self._others_serve(engine):
            tried = -1
        return target if target > max(engine.version, tried) else None

    async def _follow(self, engine: Engine) -> None:
        """Keep one engine up to date, through all of its lives."""
        initialised: int | None = None
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._due(engine) is not None)
                version = self._due(engine)
                assert version is not None
                # of several versions that wait, the newest
                self._loading[engine] = version
            try:
                await self._pool.check_weights(engine)
                incarnation = engine.incarnation
                if engine.away:
                    continue
                if initialised != incarnation:
                    await self._persist(engine, "initialise weight transfer", lambda: self._initialise(engine))
                    initialised = incarnation
                await self._update(engine, version)
            except WrongWeightsError as error:
                await self._wrong(engine, incarnation, error)
            except EngineError as error:
                if not await self._share_hangs(engine, version, error):
                    await self._unfit(engine, incarnation, error)
            finally:
                self._loader.reading.discard(engine)
                async with self._changed:
                    del self._loading[engine]
                    self._changed.notify_all()

    async def _wrong(self, engine: Engine, incarnation: int, error: WrongWeightsError) -> None:
        """An engine computes with other weights than it says: it serves nothing more, and is started anew."""
        if engine.incarnation == incarnation:
            self._on_wrong(engine, str(error))
            await self._pool.lose(engine, str(error))

    async def _prove(self, engine: Engine, version: int, before: int) -> bool:
        """See `ProofCheck.check`."""
        return await self._proofs.check(engine, version, before)

    async def _share_hangs(self, engine: Engine, version: int, error: EngineError) -> bool:
        """Whether an engine has not read a version in time that no other has read either, and is well otherwise.

        Then it is the share that hangs, and the engine goes on with the version that it has.
        """
        reading = engine in self._loader.reading and self._others_serve(engine) < version
        if not reading or engine.version < 0 or engine.away or not await only_reads(engine.client, error):
            return False
        _log.warning("%s goes on with version %d and tries again: %s", engine.name, engine.version, error)
        self._events.emit("engine.read_timed_out", engine=engine.name, version=version, why=str(error))
        await asyncio.sleep(_RETRY_S)
        return True

    async def _unfit(self, engine: Engine, incarnation: int, error: EngineError) -> None:
        """An engine went away during an update, or does not take it. It serves nothing until it has the version.

        As long as another engine serves, the run goes on without it.
        """
        if engine.incarnation != incarnation:
            return
        late = error.timed_out and len(engine.client.servers) == 1
        if not (error.unreachable or late) or await self._waits_for_ever(engine, error):
            strikes = self._strikes[engine, incarnation] = self._strikes.get((engine, incarnation), 0) + 1
            if strikes > 1 and self._others_serve(engine) < 0:
                raise PeerLostError(f"{engine.name} ({engine.client.url}) {error}")
            self._on_stale(engine, str(error))
            # counts on where the next look finds the same process healthy
            self._strikes[engine, incarnation + 1] = strikes
        await self._pool.lose(engine, str(error))

    async def _waits_for_ever(self, engine: Engine, error: EngineError) -> bool:
        """Whether the ranks of a wide replica wait for each other in a call, while their servers say that they are
        well: that does not pass, and nothing but a new start helps."""
        if not error.timed_out or len(engine.client.servers) == 1:
            return False
        return await engine.client.problem(timeout_s=_HEALTH_S) is None

    async def _update(self, engine: Engine, version: int) -> None:
        started, incarnation, before = time.monotonic(), engine.incarnation, engine.version
        try:
            await self._canary.before(engine, version)
            version, pause_s = await self._persist(
                engine, f"load version {version}", lambda: self._catch_up(engine, version)
            )
            await self._canary.after(engine, version)
            proved = await engine.call(self._prove(engine, version, before))
            if engine.incarnation == incarnation:
                engine.serve(version, proved_s=started)
        finally:
            self._loader.end_exchange(engine)
        await self._pool.notify()
        seconds = time.monotonic() - started
        self._events.emit(
            "engine.weights_updated",
            engine=engine.name,
            version=version,
            seconds=seconds,
            pause_s=pause_s,
            proved=proved,
        )

    async def _persist(self, engine: Engine, what: str, call: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Try ``call`` several times, for as long as the engine does not go away (EngineError then)."""
        incarnation = engine.incarnation
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return await engine.call(call())
            except EngineError as error:
                last = error
                # whoever does not answer may be another process when it does, and needs the whole beginning
                if engine.incarnation != incarnation or error.unreachable or error.timed_out:
                    raise
                _log.warning("%s: attempt %d to %s failed: %s", engine.name, attempt, what, error)
                await asyncio.sleep(_RETRY_S * attempt)
        raise EngineError(f"could not {what} in {_ATTEMPTS} attempts: {last}")

    async def _initialise(self, engine: Engine) -> None:
        await self._registration.register(engine.client, limit_s=self._pace.floor_s)

    async def _catch_up(self, engine: Engine, version: int) -> tuple[int, float]:
        """`_load`, which must not leave the engine behind: what another engine could load, this one must.

        What others have gone on to while this one loaded what it was asked to is its next version.
        """
        loaded, pause_s = await self._load(engine, version)
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
        """Remove old versions when a new one is served everywhere, for ever; beside updates, which must not wait."""
        while True:
            await self._collect_due.wait()
            self._collect_due.clear()
            in_use = {engine.version for engine in self._pool.engines} | set(self._loading.values())
            in_use |= {self._held_version} if self._holds else set()
            if self._choose is not None:  # any of them may be served yet
                in_use |= set(range(self._served, (self._target or 0) + 1))
            try:
                report = await asyncio.to_thread(self._collector.collect, in_use)
            except (HandoffError, OSError) as error:
                # nothing was lost: space is, until the next version
                _log.warning("old versions were not removed: %s", error)
                continue
            if report.removed or report.restored:
                self._events.emit("weights.collected", removed=report.removed, restored=report.restored)
