"""All engines as one: who serves a group, where a failed request goes next, and when an engine counts as lost."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from hpcrl.errors import DeadlineError, PeerLostError
from hpcrl.rollouts.counters import Counters
from hpcrl.rollouts.engine_client import EngineClient, EngineError, Generation, SamplingParams

__all__ = ["Engine", "EnginePool", "EngineSession"]

_log = logging.getLogger(__name__)

CacheSalt = Callable[[], Awaitable[str]]
"""Gives the salt for a request that goes to the session's engine as soon as it returns."""

_FIRST_BACKOFF_S = 0.25
_LONGEST_BACKOFF_S = 5.0
_WATCH_S = 2.0
_HEALTH_S = 5.0
_LOST_AFTER_S = 30.0
"""How long an engine that cannot be reached is given before the run ends over it."""


@dataclass(eq=False)
class Engine:
    """One engine and what is known of it.

    Attributes
    ----------
    version:
        Policy version it serves; -1 before the first.
    load:
        Rollouts assigned to it.
    open_for_new:
        Cleared while its weights change: a rollout that starts then could not say which version's cache it may
        use.
    unreachable_since:
        By the monotonic clock; None while it answers.
    """

    client: EngineClient
    version: int = -1
    load: int = 0
    open_for_new: asyncio.Event = field(default_factory=asyncio.Event)
    unreachable_since: float | None = None

    @property
    def name(self) -> str:
        return self.client.name


class EngineSession:
    """The rollouts of one group: they stay on one engine, where their common prefix is.

    Attributes
    ----------
    key:
        Sent as ``x-session-id``, for routers.
    """

    def __init__(self, pool: EnginePool, key: str, rollouts: int) -> None:
        self.key, self._pool, self._rollouts = key, pool, rollouts
        self.engine = pool.least_loaded(None)
        self.engine.load += rollouts

    def move_from(self, failed: Engine) -> None:
        """Go to another engine, unless another rollout of the group has done so already."""
        if self.engine is failed:
            failed.load -= self._rollouts
            self.engine = self._pool.least_loaded(failed)
            self.engine.load += self._rollouts

    def leave(self) -> None:
        """One rollout has ended."""
        self._rollouts -= 1
        self.engine.load -= 1


class EnginePool:
    """The engines of an attempt."""

    def __init__(
        self, clients: Sequence[EngineClient], *, counters: Counters, request_timeout_s: float, max_retries: int
    ) -> None:
        """Take the engines; nothing is sent.

        Parameters
        ----------
        clients:
            At least one.
        counters:
            ``engine_requests`` and ``engine_retries`` are counted there.
        request_timeout_s:
            Longest time without an answer to a generation request.
        max_retries:
            Attempts after the first for a generation request.
        """
        assert clients
        self.engines = [Engine(client) for client in clients]
        self._counters, self._timeout_s, self._max_retries = counters, request_timeout_s, max_retries

    @property
    def version(self) -> int:
        """Policy version that all engines serve (the lowest); -1 before all have one."""
        return min(engine.version for engine in self.engines)

    def session(self, key: str, *, rollouts: int = 1) -> EngineSession:
        """A session of ``rollouts`` rollouts on the engine with the least load."""
        return EngineSession(self, key, rollouts)

    def least_loaded(self, failed: Engine | None) -> Engine:
        """The best engine for something new: not ``failed``, answering, little loaded."""
        return min(self.engines, key=lambda e: (e is failed, e.unreachable_since is not None, e.load))

    async def generate(
        self, session: EngineSession, token_ids: list[int], params: SamplingParams, *, cache_salt: CacheSalt
    ) -> Generation:
        """Generate on the session's engine; after a failure again, with a growing pause, and elsewhere if possible.

        Parameters
        ----------
        cache_salt:
            Says for each attempt under which salt its engine may cache.

        Raises
        ------
        EngineError
            The last failure, where the request was refused or there are no attempts left.
        """
        attempt = 0
        while True:
            salt = await cache_salt()
            engine = session.engine
            self._counters.engine_requests += 1
            try:
                generation = await engine.client.generate(
                    token_ids, params, cache_salt=salt, session_id=session.key, timeout_s=self._timeout_s
                )
            except EngineError as error:
                if error.unreachable and engine.unreachable_since is None:
                    engine.unreachable_since = time.monotonic()
                if not error.retryable or attempt >= self._max_retries:
                    raise
                _log.warning("attempt %d failed: %s", attempt + 1, error)
            else:
                engine.unreachable_since = None
                return generation
            self._counters.engine_retries += 1
            session.move_from(engine)
            await asyncio.sleep(min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2**attempt))
            attempt += 1

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
            One has not answered for 30 s.
        """
        while True:
            await asyncio.sleep(_WATCH_S)
            healthy = await asyncio.gather(*(engine.client.healthy(timeout_s=_HEALTH_S) for engine in self.engines))
            now = time.monotonic()
            for engine, ok in zip(self.engines, healthy, strict=True):
                if ok:
                    engine.unreachable_since = None
                    continue
                engine.unreachable_since = engine.unreachable_since or now
                if now - engine.unreachable_since > _LOST_AFTER_S:
                    raise PeerLostError(f"{engine.name} ({engine.client.url}) has not answered for {_LOST_AFTER_S:g} s")
