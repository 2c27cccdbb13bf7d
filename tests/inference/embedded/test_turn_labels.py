"""Of an engine whose weights a trainer puts there, a label names these weights, and no request runs without it."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from delta_helpers import publish_bf16

from hpcrl.inference.embedded.engine.config import EngineSettings
from hpcrl.inference.embedded.engine.engine import Engine
from hpcrl.inference.embedded.serving.api_control import ControlApi
from hpcrl.inference.embedded.serving.errors import error_middleware
from hpcrl.inference.embedded.weights.sessions import UpdateOrderError
from hpcrl.inference.embedded.weights.turns import Turns
from hpcrl.inference.embedded.weights.updates import ReaderConfig, UpdateSession
from hpcrl.inference.metrics import EngineMetrics, Registry
from hpcrl.modeling.decoder import Decoder
from hpcrl.modeling.hf import model_tensors
from hpcrl.weights import HandoffStore
from hpcrl.weights.handover import HandoverLayer, SharedMemory, SharedTensor
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


def test_an_engine_that_is_awake_is_not_called_by_another_version(tiny: tuple[Path, Decoder]) -> None:
    """Nobody has loaded the weights of the other version."""
    sizes = {"max_num_seqs": 2, "max_model_len": 64, "max_num_batched_tokens": 64, "block_size": 16, "num_blocks": 8}
    model = copy.deepcopy(tiny[1])
    tensors = {name: tensor.detach().clone() for name, tensor in model_tensors(model).items()}
    engine = Engine(model, EngineSettings(**sizes), EngineMetrics(Registry({})))
    engine.start(lambda delivery: None)
    turns = Turns(engine, model)
    shared, offset, layer = SharedMemory.create(sum(t.nbytes + 64 for t in tensors.values())), 0, []
    try:
        for name, tensor in tensors.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            layer.append(SharedTensor(name=name, dtype=dtype, shape=tuple(tensor.shape), offset=offset))
            shared.data[offset : offset + tensor.nbytes] = (
                tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            )
            offset += -(-tensor.nbytes // 64) * 64
        turns.load(HandoverLayer(memory=shared.path, tensors=layer))
        turns.wake(12)
        turns.wake(12)  # the answer to the first call was lost
        with pytest.raises(UpdateOrderError, match="awake with version 12"):
            turns.wake(13)
        assert turns.version == 12
        turns.sleep()
        with pytest.raises(UpdateOrderError, match="were not loaded"):
            turns.wake(13)
    finally:
        turns.close()
        engine.stop()
        shared.close()


async def test_no_label_is_taken_while_weights_are_being_exchanged(
    tiny: tuple[Path, Decoder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the exchange in the engine and its record, the label of before names weights that are gone."""
    store = HandoffStore(tmp_path / "weights")
    publish_bf16(store, 2, tiny[1], tmp_path)
    metrics = EngineMetrics(Registry({}))
    sizes = {"max_num_seqs": 2, "max_model_len": 64, "max_num_batched_tokens": 64, "block_size": 16, "num_blocks": 8}
    engine = Engine(tiny[1], EngineSettings(**sizes), metrics)
    engine.start(lambda delivery: None)
    updater = UpdateSession(tiny[1], ReaderConfig(store.root, None, ReaderSettings()))
    updater.init()
    exchange, done, recorded = engine.exchange_weights, threading.Event(), threading.Event()

    def slowly_heard_of(model: Decoder, version: str) -> Any:
        old = exchange(model, version).result(60)
        done.set()
        assert recorded.wait(60)
        return SimpleNamespace(result=lambda: old)

    monkeypatch.setattr(engine, "exchange_weights", slowly_heard_of)
    control = ControlApi(cast("Any", SimpleNamespace(engine=engine)), updater, metrics)
    app = web.Application(middlewares=[error_middleware])
    app.add_routes(control.routes())
    async with TestClient(TestServer(app)) as client:
        await client.post("/start_weight_update")
        update = {"update_info": {"path": str(store.path_of(2))}}
        assert (await client.post("/update_weights", json=update)).status == 200
        finish = asyncio.create_task(client.post("/finish_weight_update", json={"weight_version": "2"}))
        assert await asyncio.to_thread(done.wait, 60)
        answer = await client.post("/update_weight_version", json={"new_version": engine.config.weight_version})
        label = engine.weight_version
        recorded.set()
        assert (await finish).status == 200
        assert (answer.status, label) == (409, "2")
        assert (await client.post("/update_weight_version", json={"new_version": "2"})).status == 200
    engine.stop()
