"""Prefill and decode engines behind a router that forwards each request from a prefill to a decode engine.

Such a router gets its engines at its start. One can be removed later, and none added. So nothing is sent to it while
any of its engines does not answer, is being updated, or serves another version than the others. That matters for
prefill more than for decode: an answer identifies the weights that sampled its tokens, but not those that computed its
prompt. When a prefill engine goes away, the requests at the router are therefore abandoned at once, before a restarted
engine with the start model could compute a prompt for them.

An engine that is gone is removed from the router where its side has another one, and requests continue. A router that
is started anew meanwhile does not get it either: its name is in a file of the attempt before anything is sent. When it
serves the newest weights, the router is started anew with it. The last engine of a side is waited for.

Routed experts of a prompt are requested after the answer: only the prefill engine that computed it has them, and the
router does not forward that engine's answer (`hpcrl.inference.vllm.routed_experts_middleware`).

With Mooncake's connector the router reads the identity of prefill engines at its own start. After a prefill engine was
restarted, the router must be restarted as well.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import re
import time
from collections.abc import Collection, Sequence
from typing import Any, Protocol, Unpack

import msgspec
import numpy as np
from numpy.typing import NDArray

from hpcrl.errors import DeadlineError
from hpcrl.rollouts.engines.client import EngineClient, EngineError, EngineProtocolError, Generation
from hpcrl.rollouts.engines.engine import Engine
from hpcrl.rollouts.engines.partial_generation import PartialGeneration
from hpcrl.rollouts.engines.routed_pool import RoutedPool, RoutedPoolSettings
from hpcrl.rollouts.engines.router_client import Worker
from hpcrl.rollouts.engines.rows import beside_loop

PREFILL, DECODE = "prefill", "decode"
"""Prefixes of the names of engines."""
_log = logging.getLogger(__name__)
_REQUEST_ID = re.compile(r"___prefill_addr_(.+?)___decode_addr_.*")
"""vllm-router's id of a request, which both of its engines get."""
_ADMIN_S = 5.0
_ROWS_S = 60.0
"""Timeout in seconds for the rows of one prompt, which have up to 79 MB."""
_TAKE_BACK_S = 1800.0
"""Minimum time in seconds between two restarts of the router that take engines back: the supervisor restarts a router
three times in an hour, and each restart repeats the requests that are at the router."""
_RESTART_S = 300.0
"""Timeout in seconds of a restart of the router by the supervisor."""


class SupervisedRouter(Protocol):
    """Process of the router."""

    def restart_router(self, why: str) -> None:
        """Ask for another one."""

    def router_ready_s(self) -> float | None:
        """Return since when the router is ready; None where it is not ready, or that is unknown."""

    def leave_out(self, engines: Collection[str]) -> None:
        """Record the engines that the next router is started without (OSError if refused)."""


class DisaggregatedPool(RoutedPool):
    """Prefill and decode engines of disaggregated serving.

    Parameters
    ----------
    clients, settings:
        Same as for `RoutedPool`; names of engines begin with their side.
    supervised:
        Restarts the router and reports restarts: the router may be replaced between two probes without being seen away,
        and one that was briefly away may be the same process.
    """

    def __init__(
        self,
        clients: Sequence[EngineClient],
        *,
        supervised: SupervisedRouter,
        **settings: Unpack[RoutedPoolSettings],
    ) -> None:
        super().__init__(clients, **settings)
        self._supervised = supervised
        # engines that the router does not have as they are now, and those that it is not to have
        self._renewed: set[str] = set()
        self._left_out: set[str] = set()
        self._taken_back_s = -math.inf
        # ready time of the router that was asked to restart, and since when no correct router exists
        self._outdated: float | None = None
        self._wrong_since: float | None = None
        self._told = False

    async def lose(self, engine: Engine, why: str) -> None:
        """Lose an engine (see `EnginePool.lose`); with a prefill engine, the requests at the router are abandoned."""
        if engine is not self.front and not engine.away and engine in self._wanted():
            # immediately: the engine may be back, and seem to serve, before the next look at the router
            self._use(set())
            if engine.name.startswith(PREFILL):
                self._renewed.add(engine.name)
                self.front.forget()
        await super().lose(engine, why)

    async def _ask(self, engine: Engine, partial: PartialGeneration, salt: str, key: str) -> Generation:
        generation = await super()._ask(engine, partial, salt, key)
        wanted = partial.wanted_rows(len(generation.token_ids))
        if not wanted:
            return generation
        experts, unknown = generation.experts, np.arange(wanted)
        if experts is not None:
            unknown = await beside_loop(functools.partial(_unknown, experts), experts.nbytes)
        if unknown.size == 0:
            return generation
        rows = await self._prompt_rows(generation.request_id)
        if rows is None:
            return generation
        if experts is None:
            # rows of the decode engine could not be fetched; they are unknown, with or without those of the prompt
            experts = np.zeros((wanted, *rows.shape[1:]), rows.dtype)
        filled = await asyncio.to_thread(_filled, experts, unknown, rows)
        left = await beside_loop(functools.partial(_unknown, filled), filled.nbytes)
        self._counters.rows_prefill += int(unknown.size - left.size)
        return msgspec.structs.replace(generation, experts=filled)

    async def _prompt_rows(self, request_id: str) -> NDArray[Any] | None:
        """Return the rows of the prefill engine that a request went to; None where it does not give them.

        The trainer then routes these tokens itself, and they are counted.
        """
        named = _REQUEST_ID.search(request_id)
        server = None if named is None else self._router.server_at(named[1])
        if named is None or server is None:
            if not self._told:
                _log.warning(
                    "routed experts of prompts are unknown: request %r names no prefill engine of this run", request_id
                )
            self._told = True
            return None
        try:
            return await server.prompt_rows(named[0], timeout_s=_ROWS_S)
        except EngineError as error:
            _log.warning("routed experts of a prompt are unknown: %s", error)
            return None

    def _routed_now(self) -> list[Engine]:
        """Return the routed engines; none as soon as one is gone, without waiting for the next look at the router."""
        now = super()._routed_now()
        return now if len(now) == len(self._wanted()) else []

    async def _reconcile(self) -> bool:
        """Reconcile with the router; return whether its usability has changed.

        Raises
        ------
        EngineError
            The router does not answer.
        """
        known = await self._router.workers(timeout_s=_ADMIN_S)
        await self._leave_out(known)
        right = self._complete() and await self._router_is_right()
        # an engine may have gone away and come back during that read
        routed = set(self._wanted()) if right and self._complete() and not self._renewed else set()
        changed = routed != self._routed
        self._use(routed)
        self._note_loads(known)
        return changed

    def _wanted(self) -> list[Engine]:
        """Return the engines that the router is to have."""
        return [engine for engine in self.engines if engine.name not in self._left_out]

    def _complete(self) -> bool:
        return all(engine.serving for engine in self._wanted())

    async def _leave_out(self, known: dict[str, Worker]) -> None:
        """Remove engines that are gone from the router, and take those back that serve again.

        Raises
        ------
        EngineError
            The router does not answer. The next look tries again.
        """
        back = {engine.name for engine in self.engines if engine.name in self._left_out and engine.serving}
        if back and self._may_take_back() and await self._record(self._left_out - back):
            self._left_out -= back
            self._renewed |= back
            self._taken_back_s = time.monotonic()
            self._use(set())
        gone = {
            engine.name
            for members in self._sides()
            for engine in members
            if engine.away and any(other.serving for other in members)
        }
        # first for a router that is started anew at this moment, then from the present one
        if gone and not await self._record(self._left_out | gone):
            return
        for engine in [engine for engine in self.engines if engine.name in self._left_out | gone]:
            for url in {server.url for server in engine.client.servers} & known.keys():
                await self._router.remove(url, timeout_s=_ADMIN_S)
        for name in sorted(gone):
            _log.warning("requests continue without %s", name)
        self._left_out |= gone
        self._renewed -= gone  # each is again when it is taken back

    def _sides(self) -> list[list[Engine]]:
        """Return the engines of each side that the router is to have."""
        wanted = self._wanted()
        return [[engine for engine in wanted if engine.name.startswith(side)] for side in (PREFILL, DECODE)]

    def _may_take_back(self) -> bool:
        """Return whether the router may be started anew for engines that are back: seldom, or for a whole side."""
        halted = any(all(engine.away for engine in members) for members in self._sides())
        return halted or time.monotonic() - self._taken_back_s > _TAKE_BACK_S

    async def _record(self, left_out: set[str]) -> bool:
        """Record which engines the next router is started without; return whether that succeeded."""
        try:
            await asyncio.to_thread(self._supervised.leave_out, left_out)
        except OSError as error:
            _log.warning("which engines the router leaves out cannot be recorded: %s", error)
            return False
        return True

    def _use(self, routed: set[Engine]) -> None:
        """Set the router's engines to ``routed``, which is all that are wanted or none; emit events for the changes."""
        for engine in sorted(self._routed - routed, key=lambda engine: engine.name):
            self._events.emit("router.engine_removed", engine=engine.name)
        for engine in sorted(routed - self._routed, key=lambda engine: engine.name):
            self._events.emit("router.engine_added", engine=engine.name)
        self._routed = routed

    async def _router_is_right(self) -> bool:
        """Return whether the router knows the current prefill engines.

        Raises
        ------
        DeadlineError
            The router had to be restarted and was not restarted in time.
        """
        if self._outdated is None and not self._renewed:
            return True
        ready_s = await asyncio.to_thread(self._supervised.router_ready_s)
        if self._outdated is not None and ready_s not in (None, self._outdated):
            self._outdated = self._wrong_since = None
            if not self._renewed:
                return True
        if self._outdated is None and ready_s is not None:
            names = ", ".join(sorted(self._renewed))
            self._renewed.clear()
            self._outdated = ready_s
            self._supervised.restart_router(f"it does not have {names} as they are now")
        now = time.monotonic()
        self._wrong_since = self._wrong_since or now
        if now - self._wrong_since > _RESTART_S:
            raise DeadlineError(f"the router was not started again within {_RESTART_S:g} s")
        return False


def _unknown(experts: NDArray[Any]) -> NDArray[np.intp]:
    """Return rows that are zero in all layers: not computed in the decode engine (`hpcrl.inference.vllm.experts`)."""
    return np.flatnonzero(experts.reshape(len(experts), -1).max(axis=1, initial=0) == 0)


def _filled(experts: NDArray[Any], unknown: NDArray[np.intp], prompt: NDArray[Any]) -> NDArray[Any]:
    """Return the routed experts, filled up from those of the prompt, which begin at the same token.

    Raises
    ------
    EngineProtocolError
        The two sides do not serve the same model.
    """
    if experts.shape[1:] != prompt.shape[1:] or len(prompt) > len(experts) or experts.dtype != prompt.dtype:
        what = f"{prompt.shape} of {prompt.dtype} of a prompt for {experts.shape} of {experts.dtype} of the whole"
        raise EngineProtocolError(f"prefill and decode return different routed experts: {what}")
    whole, unknown = experts.copy(), unknown[unknown < len(prompt)]
    whole[unknown] = prompt[unknown]
    return whole
