"""An engine that does not compute with an adapter ends the run, whatever else it answers."""

import asyncio
from types import SimpleNamespace

import aiohttp
import msgspec
import numpy as np
import pytest
from aiohttp import web

from hpcrl.errors import HandoffError
from hpcrl.rollouts.engines.client import EngineClient
from hpcrl.rollouts.weights.canary import CanaryCheck
from hpcrl.weights.format.canary import Canary
from hpcrl.weights.format.shard import TensorBytes, write_shard
from hpcrl.weights.read.adapters import ADAPTER_CONFIG, CANARY
from hpcrl.weights.store import HandoffStore
from hpcrl.weights.write.handoff_writer import ShardResult, VersionCommitter

TOKENS = [5, 3, 8, 2]
TRAINER = Canary(TOKENS, [-1.0, -2.0, -3.0], [-1.5, -1.0, -3.25])


def publish(writer, version, base=None, canary=None):
    stage = writer.stage(version)
    data = np.arange(4, dtype=np.float32)
    shard = ShardResult(
        "a.safetensors", *write_shard(stage / "a.safetensors", [TensorBytes("a", "float32", (4,), data)])
    )
    files = {} if base is None else {ADAPTER_CONFIG: b"{}"}
    if canary is not None:
        files[CANARY] = msgspec.json.encode(canary)
    kind = {"kind": "full"} if base is None else {"kind": "lora", "needs": (base,), "parent_xxh3_128": "0" * 32}
    writer.publish(version=version, shards=[shard], model_dir=None, producer="test", metadata=files, **kind)


class Server:
    """Answers as an engine does that has a version, or as one that has dropped it."""

    def __init__(self, *, ignores):
        self.ignores, self.version, self.asked = ignores, 0, []

    async def generate(self, http):
        body = await http.json()
        assert body["sampling_params"]["prompt_logprobs"] == 0
        self.asked.append(body["cache_salt"])
        scores = TRAINER.plain if self.ignores or not self.version else TRAINER.adapted
        tokens = zip(body["token_ids"][1:], scores, strict=True)
        return web.json_response({"prompt_logprobs": [None, *({str(t): {"logprob": p}} for t, p in tokens)]})


async def update(tmp_path, *, ignores, versions=(1,), served=0, canary=TRAINER):
    """The updates of an engine; what is on record of each, and what its server was asked."""
    writer = VersionCommitter.claim(tmp_path, 1)
    publish(writer, 0)
    for version in versions:
        publish(writer, version, base=0, canary=canary)
    server, events = Server(ignores=ignores), []
    app = web.Application()
    app.router.add_post("/inference/v1/generate", server.generate)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    async with aiohttp.ClientSession() as session:
        client = EngineClient(session, name="engine-0", url=f"http://127.0.0.1:{port}")
        engine = Replica(client, served)
        emit = SimpleNamespace(emit=lambda kind, **data: events.append((kind, data)))
        check = CanaryCheck(HandoffStore(tmp_path), emit, call_s=5.0)
        try:
            for version in versions:
                await check.before(engine, version)
                server.version = version
                await check.after(engine, version)
                engine.version = version
        finally:
            await runner.cleanup()
    return events, server.asked


class Replica:
    """What the check looks at of `hpcrl.rollouts.engines.engine.Engine`."""

    def __init__(self, client, version):
        self.name, self.client, self.version, self.incarnation = "engine-0", client, version, 1


def test_an_engine_with_the_adapter_is_asked_until_it_has_shown_it(tmp_path):
    events, asked = asyncio.run(update(tmp_path, ignores=False, versions=(1, 2)))
    (kind, data), *more = events
    assert kind == "engine.adapter_compared"
    assert data == {"engine": "engine-0", "version": 1, "server": 0, "outcome": "applied", "share": 1.0,
                    "deviation": 0.0}  # fmt: skip
    # before and after the first adapter; once is enough
    assert not more
    assert asked == ["canary-0", "canary-1"]


def test_an_engine_that_never_shows_it_is_reported_once(tmp_path):
    """Adapters that change next to nothing: no run goes on for long without a word of it."""
    nothing = msgspec.structs.replace(TRAINER, adapted=TRAINER.plain)
    events, _ = asyncio.run(update(tmp_path, ignores=True, versions=range(1, 12), canary=nothing))
    assert [data["outcome"] for kind, data in events if kind == "engine.adapter_compared"] == ["unclear"] * 11
    unproven = [data for kind, data in events if kind == "engine.adapter_unproven"]
    assert unproven == [{"engine": "engine-0", "version": 8, "tries": 8}]


@pytest.mark.parametrize("served", [0, -1])
def test_an_engine_without_it_ends_the_run(tmp_path, served):
    """Also one that was started anew, and was never asked before."""
    with pytest.raises(HandoffError) as caught:
        asyncio.run(update(tmp_path, ignores=True, served=served))
    message = str(caught.value)
    assert "engine-0 does not compute with the adapter of version 1" in message
    assert "show 0% of the change" in message
    assert "hint: check the engine's log for tensors that it did not load" in message
