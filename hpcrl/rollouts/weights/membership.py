"""Engines that come and go while the orchestrator works (layout ``elastic``)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import msgspec

from hpcrl.rollouts.engines.client import EngineClient
from hpcrl.rollouts.engines.engine import Engine
from hpcrl.rollouts.engines.pool import EnginePool
from hpcrl.rollouts.weights.updates import WeightUpdater
from hpcrl.runs.events import EventWriter
from hpcrl.runs.role import Member, RoleContext

_log = logging.getLogger(__name__)
_LOOK_S = 1.0


class Membership:
    """Synchronises the pool with the supervisor's list of engines.

    Parameters
    ----------
    members:
        Those that the pool was made with, in its order.
    make_client:
        Gives the client of a member.
    """

    def __init__(
        self,
        context: RoleContext,
        *,
        pool: EnginePool,
        updater: WeightUpdater,
        events: EventWriter,
        members: Sequence[Member],
        make_client: Callable[[Member], EngineClient],
    ) -> None:
        self._context, self._pool, self._updater, self._events = context, pool, updater, events
        self._make_client = make_client
        self._engines: dict[Member, Engine] = dict(zip(members, pool.engines, strict=True))

    async def run(self) -> None:
        """Look for joining and leaving engines at intervals; never return."""
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                endpoints = await asyncio.to_thread(self._context.endpoints)
            except (OSError, msgspec.DecodeError) as error:  # being replaced, on a filesystem that shows it
                _log.warning("the endpoints cannot be read now: %s", error)
                continue
            await self.apply(endpoints.members.get("engine", []))

    async def apply(self, members: Sequence[Member]) -> None:
        """Remove engines that are not in ``members``, and add those that are new.

        A replica that was started again is another member, also at the same address.
        """
        for member in [member for member in self._engines if member not in members]:
            engine = self._engines.pop(member)
            self._updater.forget(engine)
            await self._pool.remove(engine)
            self._emit("engine.removed", member)
        for member in members:
            if member not in self._engines:
                self._engines[member] = engine = await self._pool.add(self._make_client(member))
                self._updater.follow(engine)
                self._emit("engine.added", member)

    def _emit(self, kind: str, member: Member) -> None:
        _log.info("%s: replica %d at %s", kind, member.replica, member.url)
        self._events.emit(kind, engine=f"engine-{member.replica}", url=member.url)
