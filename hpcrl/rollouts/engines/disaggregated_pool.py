"""Prefill and decode engines behind a router that leads from one side to the other.

Such a router takes engines at its start alone: it cannot be told to leave one out. So nothing is sent to it while any
of its engines is gone, is changed, or serves another version than the others. That matters for prefill more than for
decode: an answer says which weights sampled its tokens, but not which computed its prompt. When a prefill engine goes
away, the requests that the router has are therefore given up at once, before one that was started anew, with the start
model, could compute a prompt for them.

Experts of a prompt are asked for behind the answer: only the prefill engine that computed it has them, and the router
does not hand on what that engine answers (`hpcrl.inference.vllm.rows_aside`).

Mooncake's connector has one more wish: the router asks a prefill engine at its own start who it is. After one was
started anew, the router must be as well.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import time
from collections.abc import Sequence
from typing import Any, Protocol, Unpack

import msgspec
import numpy as np
from numpy.typing import NDArray

from hpcrl.errors import DeadlineError
from hpcrl.rollouts.engines.client import EngineClient, EngineError, EngineProtocolError, Generation
from hpcrl.rollouts.engines.engine import Engine
from hpcrl.rollouts.engines.partial_generation import PartialGeneration
from hpcrl.rollouts.engines.routed_pool import RoutedPool, RoutedPoolSettings
from hpcrl.rollouts.engines.rows import beside_loop

__all__ = ["PREFILL", "DisaggregatedPool"]

PREFILL = "prefill"
"""How the names of engines of that side begin."""
_log = logging.getLogger(__name__)
_REQUEST_ID = re.compile(r"___prefill_addr_(.+?)___decode_addr_.*")
"""vllm-router's name of a request, which both of its engines are told."""
_ADMIN_S = 5.0
_ROWS_S = 60.0
"""For rows of one prompt: 79 MB of the longest."""
_RESTART_S = 300.0
"""How long the supervisor may take to start the router again."""


class SupervisedRouter(Protocol):
    """The router's process."""

    def restart_router(self, why: str) -> None:
        """Ask for another one."""

    def router_ready_s(self) -> float | None:
        """Since when it is ready; None where it is not, or nobody can say."""


class DisaggregatedPool(RoutedPool):
    """Both sides of disaggregated serving.

    Parameters
    ----------
    clients, settings:
        As for `RoutedPool`; names of engines begin with their side.
    supervised:
        Restarts the router, and says when it has: another one may be there between two looks, so that nobody has seen
        it away, and one that was away for a moment is no other.
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
        self._renewed: set[str] = set()
        # since when the router is ready that was asked to go, and since when there is none that is right
        self._outdated: float | None = None
        self._wrong_since: float | None = None
        self._told = False

    async def lose(self, engine: Engine, why: str) -> None:
        """See `EnginePool.lose`; with a prefill engine, what the router has is given up."""
        if engine is not self.front and not engine.away:
            # at once: it may be back, and seem to serve, before the router is looked at again
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
            # decode's own could not be fetched, and are gone with it as they would be without the prompt's
            experts = np.zeros((wanted, *rows.shape[1:]), rows.dtype)
        filled = await asyncio.to_thread(_filled, experts, unknown, rows)
        left = await beside_loop(functools.partial(_unknown, filled), filled.nbytes)
        self._counters.rows_prefill += int(unknown.size - left.size)
        return msgspec.structs.replace(generation, experts=filled)

    async def _prompt_rows(self, request_id: str) -> NDArray[Any] | None:
        """Rows of the prefill engine that a request went to; None where it does not give them: the trainer routes
        these tokens itself, and they are counted."""
        named = _REQUEST_ID.search(request_id)
        server = None if named is None else self._router.server_at(named[1])
        if named is None or server is None:
            if not self._told:
                _log.warning("experts of prompts are unknown: request %r names no prefill engine of ours", request_id)
            self._told = True
            return None
        try:
            return await server.prompt_rows(named[0], timeout_s=_ROWS_S)
        except EngineError as error:
            _log.warning("experts of a prompt are unknown: %s", error)
            return None

    def _routed_now(self) -> list[Engine]:
        """None from the moment on in which one is gone, not only from the next look at the router."""
        now = super()._routed_now()
        return now if len(now) == len(self.engines) else []

    async def _reconcile(self) -> bool:
        """Whether the router may be used has changed (EngineError where it does not answer)."""
        known = await self._router.workers(timeout_s=_ADMIN_S)
        right = self._complete() and await self._router_is_right()
        # one may have gone away, and be back, while that was read
        routed = set(self.engines) if right and self._complete() and not self._renewed else set()
        changed = routed != self._routed
        self._use(routed)
        self._note_loads(known)
        return changed

    def _complete(self) -> bool:
        return all(engine.serving for engine in self.engines)

    def _use(self, routed: set[Engine]) -> None:
        """The router's engines, all of them or none, and what is new about that."""
        for engine in sorted(self._routed - routed, key=lambda engine: engine.name):
            self._events.emit("router.engine_removed", engine=engine.name)
        for engine in sorted(routed - self._routed, key=lambda engine: engine.name):
            self._events.emit("router.engine_added", engine=engine.name)
        self._routed = routed

    async def _router_is_right(self) -> bool:
        """Whether it knows the prefill engines as they are now.

        Raises
        ------
        DeadlineError
            It was to be started again, and was not.
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
            self._supervised.restart_router(f"it knows {names} from before it was started anew")
        now = time.monotonic()
        self._wrong_since = self._wrong_since or now
        if now - self._wrong_since > _RESTART_S:
            raise DeadlineError(f"the router was not started again within {_RESTART_S:g} s")
        return False


def _unknown(experts: NDArray[Any]) -> NDArray[np.intp]:
    """Rows that are zero in all layers: nobody in the decode engine computed them (`hpcrl.inference.vllm.experts`)."""
    return np.flatnonzero(experts.reshape(len(experts), -1).max(axis=1, initial=0) == 0)


def _filled(experts: NDArray[Any], unknown: NDArray[np.intp], prompt: NDArray[Any]) -> NDArray[Any]:
    """Experts with those of the prompt, which begin at the same token, where they are unknown.

    Raises
    ------
    EngineProtocolError
        The two sides do not serve the same model.
    """
    if experts.shape[1:] != prompt.shape[1:] or len(prompt) > len(experts) or experts.dtype != prompt.dtype:
        what = f"{prompt.shape} of {prompt.dtype} of a prompt for {experts.shape} of {experts.dtype} of the whole"
        raise EngineProtocolError(f"prefill and decode return different rows of experts: {what}")
    whole, unknown = experts.copy(), unknown[unknown < len(prompt)]
    whole[unknown] = prompt[unknown]
    return whole
