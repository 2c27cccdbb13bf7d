"""All engines as one: who serves a group, where a failed request goes next, and what an engine that went away needs.

An engine that is gone does not end the run: the supervisor starts it again in its place, or ends the run itself. Until
then its rollouts go on elsewhere from the tokens that have arrived, and with no other engine they wait. It gets
nothing to do before it has the newest weights: one that was started anew serves the start model, and shows that by the
label of its weights, which we compare with what we gave it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NotRequired, TypedDict

from hpcrl.errors import DeadlineError, PeerLostError
from hpcrl.rollouts.engines.client import EngineClient, Generation, SamplingParams
from hpcrl.rollouts.engines.engine import Engine
from hpcrl.rollouts.engines.errors import EngineError, EngineProtocolError
from hpcrl.rollouts.engines.partial_generation import PartialGeneration
from hpcrl.rollouts.engines.prompts import PromptTokens
from hpcrl.rollouts.engines.rows import beside_loop
from hpcrl.rollouts.engines.sessions import EngineSession
from hpcrl.rollouts.engines.unusable import SHUN_S, Patience, UnusableAnswers
from hpcrl.rollouts.engines.weight_labels import changed_weights
from hpcrl.rollouts.telemetry.counters import Counters

__all__ = ["LOST_AFTER_S", "WATCH_S", "EnginePool", "EngineSession", "PoolLimits", "PoolSettings"]

_log = logging.getLogger(__name__)

CacheSalt = Callable[[], Awaitable[str]]
"""Gives the salt for a request that goes to the session's engine as soon as it returns."""

_FIRST_BACKOFF_S = 0.25
_LONGEST_BACKOFF_S = 5.0
WATCH_S = 2.0
"""Between two looks at engines."""
_HEALTH_S = 5.0
_SILENT_S = 15.0
"""How long an engine may not answer before its requests are sent elsewhere; one that refuses connections is gone."""
LOST_AFTER_S = 30.0
"""How long the run may be without any engine where nobody would start one again."""


class PoolLimits(TypedDict):
    """Keywords of `EnginePool` that come from the recipe and the plan."""

    counters: Counters
    request_timeout_s: float
    max_retries: int
    lost_after_s: NotRequired[float]
    on_unusable: NotRequired[Callable[[Engine, str], None]]


class PoolSettings(PoolLimits):
    """All keywords of `EnginePool`."""

    on_change: NotRequired[Callable[[bool, Engine, str], None]]


class EnginePool:
    """The engines of an attempt.

    Attributes
    ----------
    changed:
        Notified when an engine goes away, comes back, or serves another version.
    newest:
        Newest version that engines were told of; None where that is not known. An answer of a later one is damaged.
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
            Longest time without an answer to a generation request.
        max_retries:
            Attempts after the first for a generation request.
        lost_after_s:
            How long there may be no engine at all: longer than it takes to notice that one hangs and to start it
            again.
        on_change:
            Told of engines that went away (True), and why, or serve again (False).
        on_unusable:
            Told of an engine that gave several answers which cannot be used: somebody should start it anew.
        """
        self.engines = [Engine(client) for client in clients]
        self.changed = asyncio.Condition()
        self._counters, self._timeout_s, self._max_retries = counters, request_timeout_s, max_retries
        self._lost_after_s, self._on_change, self._on_unusable = lost_after_s, on_change, on_unusable
        self._unusable = UnusableAnswers()
        #: where sessions wait while there is no engine at all; nothing is ever sent to it
        self._nobody = Engine(_Nowhere(), away=True)
        #: that went away and have served nothing since: one that answers and cannot load what others serve is tried
        #: again and again, which is one absence
        self._missed: set[Engine] = set()
        self._some_serve = asyncio.Event()
        self._look = asyncio.Event()

    @property
    def version(self) -> int:
        """Policy version that all engines serve that are there (the lowest); -1 before all have one."""
        return min((engine.version for engine in self.engines if not engine.away), default=-1)

    def session(self, key: str, *, rollouts: int = 1) -> EngineSession:
        """A session of ``rollouts`` rollouts on the engine with the least load."""
        return EngineSession(self.least_loaded, key, rollouts)

    def least_loaded(self, failed: Engine | None) -> Engine:
        """The best engine for something new: serving, not stuck, not ``failed``, little loaded."""
        if not self.engines:
            return self._nobody
        return min(self.engines, key=lambda e: (not e.serving, e.stuck, e is failed, e.load))

    async def settle(self, session: EngineSession) -> Engine:
        """Wait until the session's engine serves; another one where its own does not."""
        if session.engine.stuck:
            session.move_from(session.engine)
        while not session.engine.serving:
            session.move_from(session.engine)
            if not session.engine.serving:
                # what is known may have changed since the event was set: without a wait here nobody else would come on
                self._note_serving()
                # bounded by `watch`, which ends the run when there is no engine for too long
                await self._some_serve.wait()
        return session.engine

    async def wait_open(self, session: EngineSession) -> Engine:
        """The session's engine when it serves and its weights do not change just now."""
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

        To wait until an engine is there costs no attempt, to lose one during a request does: what kills engines must
        not do so for ever. An answer that cannot be used costs none for a while (`Patience`), and neither does a router
        without an engine that takes requests: when all are busy for seconds, it takes them all for broken.

        Parameters
        ----------
        cache_salt:
            Says for each attempt under which salt its engine may cache.
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
                # one that was seen since with the right weights had them when it sampled
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
            raise EngineError(f"{engine.name}: an answer is of version {first}, it had {oldest}", forgot=True)
        if self.newest is not None and last > self.newest:
            what = f"an answer is of version {last}, and there is none above {self.newest}"
            raise EngineProtocolError(f"{engine.name}: {what}")

    async def _note_unusable(self, engine: Engine, prompt: str, error: EngineError) -> None:
        """Count an answer that cannot be used. After several of them the engine is left, and restarted by others."""
        self._counters.unusable_answers += 1
        if count := self._unusable.note(engine, prompt):
            await self._give_up(engine, f"answered {count} prompts in a way that cannot be used, the last: {error}")

    async def _give_up(self, engine: Engine, why: str) -> None:
        """An engine is broken, although it looks healthy: use others until it was started anew."""
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
        """Engines that may compute what is sent to ``engine``."""
        return [engine]

    # -- for who shows the fleet

    @property
    def router_answers(self) -> bool | None:
        """Whether the router answers; None where there is none."""
        return None

    def routed(self, engine: Engine) -> bool | None:
        """Whether a router may choose the engine; None where there is none."""
        return None

    # -- coming and going

    async def add(self, client: EngineClient) -> Engine:
        """An engine that came while the run goes on. It gets nothing before it has loaded a version."""
        engine = Engine(client)
        self.engines.append(engine)
        await self.notify()
        return engine

    async def remove(self, engine: Engine) -> None:
        """An engine was lost, or leaves: it gets nothing new, and what it is working on may still end there."""
        self.engines.remove(engine)
        self._missed.discard(engine)
        self._unusable.forget(engine)
        engine.leave()
        await self.notify()

    async def lose(self, engine: Engine, why: str) -> None:
        """An engine is not there, or has lost its weights: its calls are cut, and it serves nothing until it is back
        with the newest version."""
        if engine.away:
            return
        _log.warning("%s went away: %s", engine.name, why)
        engine.lose(why)
        if engine not in self._missed:
            self._missed.add(engine)
            self._on_change(True, engine, why)
        await self.notify()

    async def notify(self) -> None:
        """Something about an engine is different now."""
        self._note_serving()
        async with self.changed:
            self.changed.notify_all()

    def _someone_serves(self) -> bool:
        return any(engine.serving for engine in self.engines)

    def _note_serving(self) -> None:
        """At each change of `Engine.serving`: who waits for the event goes on only when somebody serves."""
        for engine in [engine for engine in self._missed if engine.serving]:
            self._missed.remove(engine)
            self._on_change(False, engine, "")
        if self._someone_serves():
            self._some_serve.set()
        else:
            self._some_serve.clear()

    def _suspect(self, engine: Engine) -> None:
        """A request failed there: send nothing more before it was looked at."""
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
            healthy = await asyncio.gather(*(engine.client.healthy(timeout_s=_HEALTH_S) for engine in waiting))
            waiting = [engine for engine, ok in zip(waiting, healthy, strict=True) if not ok]
            waiting = [engine for engine in waiting if engine in self.engines]
            if waiting and time.monotonic() > deadline:
                names = ", ".join(f"{engine.name} ({engine.client.url})" for engine in waiting)
                raise DeadlineError(f"not healthy within {timeout_s:g} s: {names}")
            if waiting:
                await asyncio.sleep(0.1)

    async def watch(self) -> None:
        """Ask engines again and again whether they live. Runs for ever.

        Raises
        ------
        PeerLostError
            None has been there for longer than ``lost_after_s``.
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
            await asyncio.sleep(_FIRST_BACKOFF_S)  # many requests may fail at once

    async def _check(self, engine: Engine) -> None:
        if engine.shunned:
            return
        problem = await engine.client.problem(timeout_s=_HEALTH_S)
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
        """Find out whether the engine still has the weights that it was given, as far as it says."""
        if changed := await changed_weights(engine, timeout_s=_HEALTH_S):
            await self.lose(engine, changed)


class _Nowhere(EngineClient):
    """The client of no engine."""

    def __init__(self) -> None:
        self.name, self.url = "no engine", ""
