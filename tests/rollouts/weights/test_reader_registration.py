"""What engines are told of the versions that they will read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.config.plan import Role
from hpcrl.config.recipe import Recipe
from hpcrl.jobplan.groups import make_groups
from hpcrl.rollouts.engines.client import EngineClient
from hpcrl.rollouts.engines.replica_client import ReplicaClient
from hpcrl.rollouts.weights.registration import ReaderRegistration
from hpcrl.supervisor.launch.commands import fill_placeholders
from hpcrl.weights.read.registration import ReaderIdentity, check_same_reader

ROOT = Path("/runs/one/weights")


class Told(EngineClient):
    """A server that writes down what it is told."""

    def __init__(self, session: aiohttp.ClientSession, **settings: Any) -> None:
        super().__init__(session, **settings)
        self.infos: list[dict[str, Any]] = []

    async def control(self, path: str, value: dict[str, Any] | None = None, *, timeout_s: float) -> dict[str, Any]:
        assert (path, timeout_s) == ("/init_weight_transfer_engine", 5.0)
        assert value is not None
        # as it goes over the wire
        self.infos.append(msgspec.json.decode(msgspec.json.encode(value))["init_info"])
        return {}


def recipe(*settings: str) -> Recipe:
    return load_recipe("quickstart_vllm", list(settings)).value


async def identity_of(recipe: Recipe) -> ReaderIdentity:
    async with aiohttp.ClientSession() as session:
        told = Told(session, name="engine-1", url="http://node7:8000")
        await ReaderRegistration.of(recipe, ROOT).register(told, limit_s=5.0)
    (info,) = told.infos
    assert info["root"] == str(ROOT)
    return msgspec.convert(info["reader"], ReaderIdentity)


async def test_an_engine_reads_as_the_recipe_says() -> None:
    settings = ("handoff.node_cache=/fast", "handoff.node_cache_gib=2", "handoff.update_timeout_s=33")
    told = await identity_of(recipe(*settings, "engine.replicas=2", "handoff.lease_timeout_s=7"))
    assert (told.name, told.expiry_s, told.floor_s) == ("engine-1", 7.0, 33.0)
    assert (told.cache_dir, told.cache_bytes) == ("/fast", 2 << 30)
    # other nodes reach it where requests do
    assert told.fanout_host == "node7"
    assert told.settings.cache_dir == Path("/fast")
    assert told.settings.pace.limit_s(0) == 33.0


@pytest.mark.parametrize("settings", [("handoff.fanout=off",), ("handoff.node_cache=null",), ("engine.replicas=1",)])
async def test_without_a_cache_or_another_node_there_is_no_server(settings: tuple[str, ...]) -> None:
    assert (await identity_of(recipe("engine.replicas=2", *settings))).fanout_host is None


@pytest.mark.parametrize(
    "settings", [(), ("handoff.node_cache=/fast", "handoff.node_cache_gib=2", "engine.replicas=2")]
)
async def test_an_engine_was_started_as_whom_it_is_taken_for(settings: tuple[str, ...]) -> None:
    """vLLM's engines know it from their command line, and refuse a call that says otherwise."""
    groups = make_groups(recipe(*settings), load_cluster("local").value, "one")
    (engine,) = [group for group in groups if group.role is Role.ENGINE]
    values = {"python": "p", "run_dir": "/runs/one", "replica": "1", "host": "node7", "port": "8000"}
    words = fill_placeholders(engine.command, values)
    own = json.loads(words[words.index("--additional-config") + 1])["hpcrl"]
    started_as, told = msgspec.convert(own["reader"], ReaderIdentity), await identity_of(recipe(*settings))
    assert (started_as, own["servers"]) == (told, 1)
    who: dict[str, Any] = {"root": ROOT, "name": started_as.name, "settings": started_as.settings}
    given = {"root": str(ROOT), "reader": msgspec.to_builtins(told)}
    for same in (given, {}, {"root": str(ROOT)}):
        check_same_reader(same, **who)
    for key, other in (("name", "engine-2"), ("cache_dir", "/dev/shm/mine"), ("fanout_host", "10.0.0.9")):
        with pytest.raises(ValueError, match=f"was started with {key}"):
            check_same_reader({"root": str(ROOT), "reader": {**given["reader"], key: other}}, **who)
    with pytest.raises(ValueError, match="was started with root"):
        check_same_reader({**given, "root": "/tmp/poison"}, **who)


async def test_ranks_of_a_wide_replica_have_names_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcrl.rollouts.engines.replica_client.EngineClient", Told)
    async with aiohttp.ClientSession() as session:
        replica = ReplicaClient(session, name="decode-0", urls=["http://a:1", "http://b:1"])
        await ReaderRegistration.of(recipe("engine.replicas=2"), ROOT).register(replica, limit_s=5.0)
    readers = [info["reader"] for server in replica.servers for info in server.infos]  # type: ignore[attr-defined]
    assert [(reader["name"], reader["fanout_host"]) for reader in readers] == [("decode-0-0", "a"), ("decode-0-1", "b")]
