"""Of an engine whose weights a trainer puts there, a label names these weights, and no request runs without it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from hpcrl.inference.embedded.engine.config import EngineSettings
from hpcrl.inference.embedded.engine.engine import Engine
from hpcrl.inference.embedded.serving.api_control import ControlApi
from hpcrl.inference.embedded.serving.errors import error_middleware
from hpcrl.inference.embedded.weights.turns import Turns
from hpcrl.inference.embedded.weights.updates import ReaderConfig, UpdateSession
from hpcrl.inference.metrics import EngineMetrics, Registry
from hpcrl.modeling.decoder import Decoder
from hpcrl.weights.read.subscriber import ReaderSettings


@pytest.fixture
async def scene(tiny: tuple[Path, Decoder]) -> AsyncIterator[tuple[TestClient[Any, Any], SimpleNamespace]]:
    """A client of an engine, and whose turn it is: what `Turns` says of that, without shared memory."""
    turns = SimpleNamespace(is_asleep=True, version=None)
    metrics = EngineMetrics(Registry({}))
    sizes = {"max_num_seqs": 2, "max_model_len": 64, "max_num_batched_tokens": 64, "block_size": 16, "num_blocks": 8}
    engine = Engine(tiny[1], EngineSettings(**sizes), metrics)
    engine.start(lambda delivery: None)
    updater = UpdateSession(tiny[1], ReaderConfig(None, None, ReaderSettings()))
    control = ControlApi(cast("Any", SimpleNamespace(engine=engine)), updater, metrics, cast("Turns", turns))
    app = web.Application(middlewares=[error_middleware])
    app.add_routes(control.routes())
    async with TestClient(TestServer(app)) as client:
        yield client, turns
    engine.stop()


async def test_labels_of_weights_that_a_trainer_has_put_there(
    scene: tuple[TestClient[Any, Any], SimpleNamespace],
) -> None:
    client, turns = scene

    async def label(version: str) -> int:
        return (await client.post("/update_weight_version", json={"new_version": version})).status

    async def resume() -> int:
        return (await client.post("/resume")).status

    assert (await label("0"), await resume()) == (409, 409)  # it sleeps, and has none
    turns.is_asleep, turns.version = False, 0
    assert (await label("1"), await resume()) == (409, 409)
    assert (await label("0"), await resume()) == (200, 200)
    turns.version = 1  # the trainer's next turn
    assert (await label("0"), await resume()) == (409, 409)
    assert (await (await client.get("/weight_info")).json())["weight_version"] == "0"
    assert (await label("1"), await resume()) == (200, 200)
    assert (await (await client.get("/weight_info")).json())["weight_version"] == "1"
