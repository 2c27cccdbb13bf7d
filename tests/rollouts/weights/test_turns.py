"""Whose turn it is, as the orchestrator decides it: when a batch may end that of the engines."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from hpcrl.config.load import load_recipe
from hpcrl.rollouts.core.counters import Counters
from hpcrl.rollouts.engines.client import EngineClient, EngineError
from hpcrl.rollouts.engines.pool import EnginePool
from hpcrl.rollouts.weights.make import make_updater
from hpcrl.rollouts.weights.turns import TurnUpdater
from hpcrl.runs.events import EventWriter
from hpcrl.runs.rundir import RunDir

SOON_S, LONG_S = 0.05, 20.0


class Server(EngineClient):
    """An engine that writes down what it is told, and is well."""

    def __init__(self, session: aiohttp.ClientSession, *, name: str) -> None:
        super().__init__(session, name=name, url="http://node:8000")
        self.told: list[str] = []
        self.refuses = 0

    async def control(self, path: str, value: dict[str, Any] | None = None, *, timeout_s: float) -> dict[str, Any]:
        if self.refuses:
            self.refuses -= 1
            raise EngineError(f"{self.name}: not now")
        self.told.append(f"{path} {value['new_version']}" if value else path)
        return {}


class Scene:
    """Two engines and their updater."""

    def __init__(self, session: aiohttp.ClientSession, run: RunDir, events: EventWriter) -> None:
        self.servers = [Server(session, name=f"engine-{i}") for i in range(2)]
        self.pool = EnginePool(self.servers, counters=Counters(), request_timeout_s=5.0, max_retries=0)
        self.served: list[int] = []
        updater = make_updater(
            load_recipe("quickstart_colocated").value,
            run,
            pool=self.pool,
            events=events,
            on_served=self.served.append,
            on_stale=lambda engine, why: None,
            choose=None,
        )
        assert isinstance(updater, TurnUpdater)
        self.updater = updater

    def updating(self) -> list[bool]:
        return [self.updater.exchanging(engine) for engine in self.pool.engines]


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    run = RunDir(tmp_path / "run")
    attempt = run.start_attempt()
    events = EventWriter(run, attempt=attempt, writer="orchestrator-0")
    async with aiohttp.ClientSession() as session:
        scene = Scene(session, run, events)
        work = asyncio.create_task(scene.updater.run())
        yield scene
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work
    events.close()


async def test_a_batch_ends_the_turn_of_engines_when_they_serve_the_version_before(scene: Scene) -> None:
    updater = scene.updater
    assert not await updater.release_batch_when_served(1, wait_s=SOON_S)
    await updater.announce(0)
    assert await updater.release_batch_when_served(1, wait_s=LONG_S)
    assert scene.served == [0]
    assert [server.told for server in scene.servers] == [["/update_weight_version 0", "/resume"]] * 2
    # nobody can expect tokens of them before they have the next version
    assert scene.updating() == [True, True]
    # another rank, or the same one again
    assert await updater.release_batch_when_served(1, wait_s=SOON_S)
    # a batch that is ready already waits for the version of this one
    early = asyncio.create_task(updater.release_batch_when_served(2, wait_s=LONG_S))
    await asyncio.sleep(SOON_S)
    assert not early.done()
    scene.servers[1].refuses = 1
    await updater.announce(1)
    assert await early
    assert scene.served == [0, 1]
    assert [server.told[-2:] for server in scene.servers] == [["/update_weight_version 1", "/resume"]] * 2


async def test_the_turn_of_the_trainer_waits_for_an_evaluation_and_the_other_way_round(scene: Scene) -> None:
    updater = scene.updater
    await updater.announce(0)
    await updater.wait_served(0)
    async with updater.held():
        assert not await updater.release_batch_when_served(1, wait_s=SOON_S)
        waiting = asyncio.create_task(updater.release_batch_when_served(1, wait_s=LONG_S))
        await asyncio.sleep(SOON_S)
    assert await waiting
    entered = asyncio.Event()

    async def evaluate() -> None:
        async with updater.held():
            entered.set()

    evaluation = asyncio.create_task(evaluate())
    await asyncio.sleep(SOON_S)
    assert not entered.is_set()
    await updater.announce(1)
    await asyncio.wait_for(evaluation, LONG_S)
