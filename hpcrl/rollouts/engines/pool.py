"""Pool of engines: assignment of groups, retries of failed requests, and handling of engines that went away.

A lost engine does not end the run: the supervisor restarts it, or ends the run itself. Until then its rollouts continue
on other engines from the tokens that have arrived, and without another engine they wait. It gets no requests before it
has the newest weights: a restarted engine serves the start model, which the label of its weights shows.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NotRequired, TypedDict

from hpcrl.errors import DeadlineError, PeerLostError
from hpcrl.rollouts.core.counters import Counters
from hpcrl.rollouts.core.prompts import PromptTokens
from hpcrl.rollouts.engines.client import HEALTH_S, EngineClient, Generation, SamplingParams
from hpcrl.rollouts.engines.engine import Engine
from hpcrl.rollouts.engines.errors import EngineError, EngineProtocolError
from hpcrl.rollouts.engines.partial_generation import PartialGeneration
from hpcrl.rollouts.engines.rows import beside_loop
from hpcrl.rollouts.engines.sessions import EngineSession
from hpcrl.rollouts.engines.unusable import SHUN_S, Patience, UnusableAnswers
from hpcrl.rollouts.engines.weight_labels import changed_weights

__all__ = ["LOST_AFTER_S", "WATCH_S", "EnginePool", "EngineSession", "PoolLimits", "PoolSettings"]

_log = logging.getLogger(__name__)

CacheSalt = Callable[[], Awaitable[str]]
"""Returns the salt for a request that is sent to the session's engine immediately afterwards."""

_FIRST_BACKOFF_S = 0.25
_LONGEST_BACKOFF_S = 5.0
WATCH_S = 2.0
"""Seconds between two probes of the engines."""
_SILENT_S = 15.0
"""Time in seconds without an answer after which requests move to other engines; a refused connection counts at once."""
LOST_AFTER_S = 30.0
"""Maximum time in seconds without any engine, where no supervisor would restart one."""


class PoolLimits(TypedDict):
    """Keywords of `EnginePool` that come from the recipe and the plan."""

    counters: Counters
    request_timeout_s: float
    max_retries: int
    lost_after_s: NotRequired[float]
    on_unusable: NotRequired[Callable[[Engine, str], None]]


class PoolSettings(PoolLimits):
    """Keyword arguments of `EnginePool`."""

    on_change: NotRequired[Callable[[bool, Engine, str], None]]


class EnginePool:
    """Engines of an attempt.

    Attributes
    ----------
    changed:
        Notified when an engine goes away, comes back, or serves another version.
    newest:
        Newest version that engines were asked to load; None where it is unknown. An answer of a later version is
        damaged.
    """

    newest: int | None = None

    def __init__(
        self,
        clients: Sequence[EngineClient],
        *,
        counters: Counters,
        request_timeout_s: float,
        max_retries: int,
        lost_after_s: float = LOST_AFTER_S,
        on_change: Callable[[bool, Engine, str], None] = lambda away, engine, why: None,
        on_unusable: Callable[[Engine, str], None] = lambda engine, why: None,
    ) -> None:
        """Take the engines; nothing is sent.

        Parameters
        ----------
        clients:
            At least one, where engines do not come and go.
        counters:
            ``engine_requests`` and ``engine_retries`` are counted there.
        request_timeout_s:
            Timeout in seconds of a generation request that gives no answer.
        max_retries:
            Maximum number of attempts after the first for a generation request.
        lost_after_s:
            Maximum time in seconds without any engine: longer than it takes to detect a hang and to restart an engine.
        on_change:
            Called for engines that went away (True), with the reason, or serve again (False).
        on_unusable:
            Called for an engine that gave several unusable answers and should be restarted.
        """
        self.engines = [Engine(client) for client in clients]
        self.changed = asyncio.Condition()
        self._counters, self._timeout_s, self._max_retries = counters, request_timeout_s, max_retries
        self._lost_after_s, self._on_change, self._on_unusable = lost_after_s, on_change, on_unusable
        self._unusable = UnusableAnswers()
        #: placeholder for sessions that wait while there is no engine at all; it gets no requests
        self._nobody = Engine(_Nowhere(), away=True)
        #: engines that went away and have served nothing since: repeated attempts to load a version count as one
        #: absence
        self._missed: set[Engine] = set()
        self._some_serve = asyncio.Event()
        self._look = asyncio.Event()

    @property
    def version(self) -> int:
        """Return the lowest policy version of all engines that are not away; -1 before all have one."""
        return min((engine.version for engine in self.engines if not engine.away), default=-1)

    def session(self, key: str, *, rollouts: int = 1) -> EngineSession:
        """Return a session of ``rollouts`` rollouts on the engine with the least load."""
        return EngineSession(self.least_loaded, key, rollouts)

    def least_loaded(self, failed: Engine | None) -> Engine:
        """Return the best engine for new work: serving, not stuck, not ``failed``, lowest load."""
        if not self.engines:
            return self._nobody
        return min(self.engines, key=lambda e: (not e.serving, e.stuck, e is failed, e.load))

    async def settle(self, session: EngineSession) -> Engine:
        """Wait until an engine serves the session, which moves from one that does not; return the engine."""
        if session.engine.stuck:
            session.move_from(session.engine)
        while not session.engine.serving:
            session.move_from(session.engine)
            if not session.engine.serving:
                # the state may have changed since the event was set; without a wait here other tasks would not run
                self._note_serving()
                # bounded by `watch`, which ends the run when there is no engine for too long
                await self._some_serve.wait()
        return session.engine

    async def wait_open(self, session: EngineSession) -> Engine:
        """Wait until the session's engine serves and its weights are not changing; return it."""
        while True:
            engine = await self.settle(session)
            await engine.opened()
            if engine is session.engine and engine.serving:
                return engine

    async def generate(
        self,
        session: EngineSession,
        token_ids: PromptTokens,
        params: SamplingParams,
        *,
        cache_salt: CacheSalt,
        rows: bool = True,
    ) -> Generation:
        """Generate on the session's engine; after a failure again, with a growing pause, and elsewhere if possible.

        Waiting for an engine does not count as an attempt. Losing one during a request does, so that a request which
        crashes engines is not repeated without limit. An unusable answer does not count for a while (`Patience`), and
        neither does a router without an available engine: it considers all engines broken when all are busy for
        seconds.

        Parameters
        ----------
        cache_salt:
            Returns for each attempt the salt under which its engine may cache.
        rows:
            Whether rows of experts are wanted where ``params`` ask for them.

        Raises
        ------
        EngineError
            The last failure, where the request was refused or there are no attempts left.
        """
        partial, attempt, pauses, patience = PartialGeneration(token_ids, params, rows=rows), 0, 0, Patience()
        while True:
            await self.settle(session)
            salt = await cache_salt()
            engine = session.engine
            if not engine.serving:
                continue
            self._counters.engine_requests += 1
            oldest, incarnation = engine.version, engine.incarnation
            asked_s, candidates = time.monotonic(), self._behind(engine)
            try:
                generation = await engine.call(self._ask(engine, partial, salt, session.key))
                self._check_versions(engine, generation, oldest)
            except EngineError as error:
                unusable = isinstance(error, EngineProtocolError)
                if unusable and incarnation == engine.incarnation:
                    await self._note_unusable(engine, session.key, error)
                if error.forgot and incarnation == engine.incarnation:
                    await self.lose(engine, str(error))
                elif error.unreachable and not engine.suspected:
                    self._suspect(engine)
                excused = (unusable or error.untaken or engine.shunned) and patience.lasts()
                if not error.retryable or (attempt >= self._max_retries and not excused):
                    raise
                attempt += not excused
                damaged = error.forgot or (unusable and not error.unreachable)
                # an engine that has proved its weights since then had them when it sampled
                if not damaged and all(candidate.proved_s >= asked_s for candidate in candidates):
                    self._counters.tokens_kept += partial.keep()
                _log.warning("attempt %d failed: %s", pauses + 1, error)
            else:
                return await beside_loop(functools.partial(partial.whole, generation), partial.row_bytes(generation))
            self._counters.engine_retries += 1
            session.move_from(engine)
            await asyncio.sleep(min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** min(pauses, 16)))
            pauses += 1

    def _check_versions(self, engine: Engine, generation: Generation, oldest: int) -> None:
        """Refuse an answer of versions that the engine cannot have (EngineError)."""
        first, last = int(generation.versions.min()), int(generation.versions.max())
        if first < oldest:
            raise EngineError(f"{engine.name}: an answer is of version {first}, the engine had {oldest}", forgot=True)
        if self.newest is not None and last > self.newest:
            what = f"an answer is of version {last}, the newest is {self.newest}"
            raise EngineProtocolError(f"{engine.name}: {what}")

    async def _note_unusable(self, engine: Engine, prompt: str, error: EngineError) -> None:
        """Count an unusable answer. After several of them the engine is avoided, and the supervisor restarts it."""
        self._counters.unusable_answers += 1
        if count := self._unusable.note(engine, prompt):
            await self._give_up(engine, f"gave {count} unusable answers, the last: {error}")

    async def _give_up(self, engine: Engine, why: str) -> None:
        """Lose and avoid an engine that gives unusable answers although it is healthy, until it was restarted."""
        self._on_unusable(engine, why)
        engine.shun(SHUN_S)
        await self.lose(engine, why)

    async def _ask(self, engine: Engine, partial: PartialGeneration, salt: str, key: str) -> Generation:
        token_ids, params = partial.request(lambda: engine.version)
        return await engine.client.generate(
            token_ids,
            params,
            cache_salt=salt,
            session_id=key,
            timeout_s=self._timeout_s,
            on_part=partial.receive,
            rows=partial.wants_rows,
        )

    def _behind(self, engine: Engine) -> list[Engine]:
        """Return the engines that may compute a request which is sent to ``engine``."""
        return [engine]

    # -- for who shows the fleet

    @property
    def router_answers(self) -> bool | None:
        """Return whether the router answers; None where there is none."""
        return None

    def routed(self, engine: Engine) -> bool | None:
        """Return whether a router may choose the engine; None where there is none."""
        return None

    # -- coming and going

    async def add(self, client: EngineClient) -> Engine:
        """Add an engine that joins during the run. It gets no requests before it has loaded a version."""
        engine = Engine(client)
        self.engines.append(engine)
        await self.notify()
        return engine

    async def remove(self, engine: Engine) -> None:
        """Remove an engine that was lost or leaves. It gets nothing new; requests in flight may still end there."""
        self.engines.remove(engine)
        self._missed.discard(engine)
        self._unusable.forget(engine)
        engine.leave()
        await self.notify()

    async def lose(self, engine: Engine, why: str) -> None:
        """Mark an engine as gone, or without weights.

        Its calls are cancelled, and it serves nothing until it is back with the newest version.
        """
        if engine.away:
            return
        _log.warning("%s went away: %s", engine.name, why)
        engine.lose(why)
        if engine not in self._missed:
            self._missed.add(engine)
            self._on_change(True, engine, why)
        await self.notify()

    async def notify(self) -> None:
        """Notify waiting tasks that the state of an engine has changed."""
        self._note_serving()
        async with self.changed:
            self.changed.notify_all()

    def _someone_serves(self) -> bool:
        return any(engine.serving for engine in self.engines)

    def _note_serving(self) -> None:
        """Update the event of waiting tasks at each change of `Engine.serving`: it is set while an engine serves."""
        for engine in [engine for engine in self._missed if engine.serving]:
            self._missed.remove(engine)
            self._on_change(False, engine, "")
        if self._someone_serves():
            self._some_serve.set()
        else:
            self._some_serve.clear()

    def _suspect(self, engine: Engine) -> None:
        """Suspect an engine whose request failed: send nothing more before it was probed."""
        engine.suspect()
        self._note_serving()
        self._look.set()

    async def wait_healthy(self, *, timeout_s: float) -> None:
        """Wait until every engine is healthy.

        Raises
        ------
        DeadlineError
            Naming those that are not.
        """
        deadline = time.monotonic() + timeout_s
        waiting = list(self.engines)
        while waiting:
            healthy = await asyncio.gather(*(engine.client.healthy(timeout_s=HEALTH_S) for engine in waiting))
            waiting = [engine for engine, ok in zip(waiting, healthy, strict=True) if not ok]
            waiting = [engine for engine in waiting if engine in self.engines]
            if waiting and time.monotonic() > deadline:
                names = ", ".join(f"{engine.name} ({engine.client.url})" for engine in waiting)
                raise DeadlineError(f"not healthy within {timeout_s:g} s: {names}")
            if waiting:
                await asyncio.sleep(0.1)

    async def watch(self) -> None:
        """Probe the engines at intervals; never return.

        Raises
        ------
        PeerLostError
            No engine has been available for longer than ``lost_after_s`` seconds.
        """
        there = time.monotonic()
        while True:
            self._look.clear()
            await asyncio.gather(*(self._check(engine) for engine in self.engines))
            now = time.monotonic()
            if any(engine.answers for engine in self.engines):
                there = now
            if now - there > self._lost_after_s:
                names = ", ".join(f"{engine.name} ({engine.client.url})" for engine in self.engines)
                raise PeerLostError(f"{names} has not answered for {self._lost_after_s:g} s")
            try:
                async with asyncio.timeout(WATCH_S):
                    await self._look.wait()
            except TimeoutError:
                continue
            # requests often fail together: one look serves all of them
            await asyncio.sleep(_FIRST_BACKOFF_S)

    async def _check(self, engine: Engine) -> None:
        if engine.shunned:
            return
        problem = await engine.client.problem(timeout_s=HEALTH_S)
        if problem is not None:
            silent_s = engine.silent(refused=problem.refused)
            self._note_serving()
            if not problem.unreachable or problem.refused or silent_s > _SILENT_S:
                await self.lose(engine, str(problem))
            return
        await self.check_weights(engine)
        news = not engine.answers
        engine.answered()
        if news:
            await self.notify()

    async def check_weights(self, engine: Engine) -> None:
        """Check that the engine still has the weights that it was given, as far as it reports them."""
        if changed := await changed_weights(engine, timeout_s=HEALTH_S):
            await self.lose(engine, changed)


class _Nowhere(EngineClient):
    """Client that represents the absence of engines."""

    def __init__(self) -> None:
        self.name, self.url = "no engine", ""
