"""A stub of a wide replica: ranks with a server each, which compute each step together and stop and go on together.

What vLLM's ranks do among themselves is played by what it leads to: a pause is answered when all ranks were asked for
one, and none goes on before all were told to.
"""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web
from stub_engine import StubEngine

_TICK_S = 0.005


class StubRank(StubEngine):
    """One rank.

    Attributes
    ----------
    ranks:
        All of the replica, this one included.
    violations:
        What must never be: a step of ranks with different weights, weights that change while a rank computes.
    unreadable:
        Why the version that was read cannot be loaded; said so often as `bad_reads`.
    fail_exchanges:
        Loads in place that are answered 500 before one works again; the other ranks load.
    deaf:
        Calls that stop it never come through, though its server says that it is well.
    mute:
        Its metrics are not answered.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.in_place = True
        self.ranks: list[StubRank] = [self]
        self.violations: list[str] = []
        self.unreadable, self.bad_reads = "it is torn", 0
        self.fail_exchanges = 0
        self.deaf = self.mute = False
        self._resuming = self._in_session = False

    @property
    def stands(self) -> bool:
        return not self.unpaused.is_set()

    async def step(self) -> None:
        await super().step()
        if len(versions := {rank.version for rank in self.ranks}) > 1:
            self.violations.append(f"a step with weights {sorted(versions)}")

    async def pause(self, request: web.Request) -> web.Response:
        while self.deaf:
            await asyncio.sleep(_TICK_S)
        self._resuming = False
        answer = await super().pause(request)
        while not all(rank.stands for rank in self.ranks):
            await asyncio.sleep(_TICK_S)
        return answer

    async def resume(self, request: web.Request) -> web.Response:
        if self.stands and not all(rank.stands or (rank.unpaused.is_set() and rank._resuming) for rank in self.ranks):
            return web.Response(status=500, text="the pause is still in flight")
        self._resuming = True
        while not all(rank._resuming for rank in self.ranks):
            await asyncio.sleep(_TICK_S)
        return await super().resume(request)

    async def start_update(self, request: web.Request) -> web.Response:
        if self._in_session:
            return web.Response(status=500, text="a weight update is already active")
        self._in_session = True
        return await super().start_update(request)

    async def finish_update(self, request: web.Request) -> web.Response:
        if not self._in_session:
            return web.Response(status=500, text="no weight update is active")
        self._in_session = False
        return await super().finish_update(request)

    async def update(self, request: web.Request) -> web.Response:
        info = (await request.json())["update_info"]
        if not info.get("stage"):
            if not all(rank.stands for rank in self.ranks):
                self.violations.append("weights change while a rank computes")
            if self.fail_exchanges > 0:
                self.fail_exchanges -= 1
                self._in_session = False
                return web.Response(status=500, text="ordered to fail")
        return await super().update(request)

    async def collective_rpc(self, request: web.Request) -> web.Response:
        if (await request.json())["method"] == "abandon_weight_update":
            self._in_session = False
            return web.json_response({"results": [None]})
        if (await request.json())["method"] == "staged_problem":
            self.bad_reads -= 1
            return web.json_response({"results": [self.unreadable if self.bad_reads >= 0 else ""]})
        return await super().collective_rpc(request)

    async def restart(self) -> None:
        self._in_session = False
        await super().restart()

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(status=500) if self.mute else await super().metrics(request)


def stub_replica(ranks: int = 2, **settings: Any) -> list[StubRank]:
    """The ranks of one replica."""
    made = [StubRank(**settings) for _ in range(ranks)]
    for rank in made:
        rank.ranks = made
    return made
