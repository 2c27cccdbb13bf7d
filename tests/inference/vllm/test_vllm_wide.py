"""One replica of two real vLLM ranks with an API server each and experts on both, led as the orchestrator does.

The ranks are started by the command that a plan has for nodes of one rank; here both nodes are this machine.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from engine_helpers import Server, logprob_error, publish, random_model, tensors_of
from free_ports import free_blocks
from vllm_environment import VLLM_PYTHON
from vllm_fleet import HOST, generate

from hpcrl.config.load import load_recipe
from hpcrl.config.plan import Role
from hpcrl.jobplan.commands.vllm import vllm_command, vllm_ports, vllm_variables
from hpcrl.modeling.decoder import Decoder
from hpcrl.network.credentials import Credentials
from hpcrl.rollouts.engines.client import EngineError
from hpcrl.rollouts.engines.replica_client import ReplicaClient
from hpcrl.rollouts.weights.exchange import begin, exchange, wait_staged
from hpcrl.rollouts.weights.registration import ReaderRegistration
from hpcrl.runs.events import read_events
from hpcrl.runs.rundir import RunDir
from hpcrl.supervisor.launch.commands import fill_placeholders
from hpcrl.supervisor.process.node_values import fill_node, fill_node_rank
from hpcrl.weights import HandoffStore
from hpcrl.weights.lifetime.leases import ReaderWatch

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(2400)]

NAME = "quickstart_vllm"
RANKS = 2
#: both compute in float32, but not in the same order
TOLERANCE = 2e-3
LIMIT_S = 300.0
#: how long a request lasts that is to be in flight during an update, and its least and most tokens
LONG_S = 12.0
LONG_TOKENS = (60, 900)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    run = RunDir(tmp_path_factory.mktemp("wide") / "run")
    run.path.mkdir()
    run.start_attempt()
    return run


@pytest.fixture(scope="module")
def servers(tiny: tuple[Path, Decoder], run: RunDir) -> Iterator[list[Server]]:
    path, model = tiny
    settings = [f"model.path={path}", "engine.max_model_len=1024", "engine.kv_store=null"]
    recipe = load_recipe(NAME, settings).value
    command = vllm_command(recipe, Role.ENGINE, nodes=RANKS, ranks_per_node=1)
    ports = free_blocks([vllm_ports(1, nodes=RANKS)] * RANKS)
    who = {"RUN_DIR": str(run.path), "ATTEMPT": "1", "ROLE": "engine", "REPLICA": "0"}
    env = {**os.environ, **vllm_variables(recipe, gpus=False), "OMP_NUM_THREADS": "1"}
    env |= {f"HPCRL_{name}": value for name, value in who.items()}
    env = fill_node(env, 0, hosts=[HOST], interfaces=[])  # as the guard does
    headers = Credentials.of_run(run.path, 1).headers
    started = []
    for rank, port in enumerate(ports):
        words = [fill_node_rank(word, rank, [HOST] * RANKS) for word in command]
        words = fill_placeholders(
            words, {"python": str(VLLM_PYTHON), "host": HOST, "port": str(ports[0]), "replica": "0"}
        )
        # on a node of its own it would have the same port
        words[words.index("--port") + 1] = str(port)
        log = run.path / f"rank-{rank}.log"
        with log.open("wb") as stream:
            process = subprocess.Popen(words, stdout=stream, stderr=stream, start_new_session=True, env=env)
        url = f"http://{HOST}:{port}"
        started.append(Server(process, url, log, model, path, kind="vllm", timeout_s=LIMIT_S, headers=headers))
    try:
        deadline = time.monotonic() + 1500.0
        for server in started:
            while not _healthy(server):
                dead = [each.log.read_text()[-5000:] for each in started if each.process.poll() is not None]
                assert not dead, dead[0]
                assert time.monotonic() < deadline, server.log.read_text()[-5000:]
                time.sleep(0.5)
        yield started
    finally:
        for server in started:
            server.stop()


def _healthy(server: Server) -> bool:
    try:
        return bool(server.get("/health")[0] == 200)
    except OSError:
        return False


@pytest.fixture
async def replica(servers: list[Server], run: RunDir) -> AsyncIterator[ReplicaClient]:
    """Its ranks are readers of the versions of the run."""
    # servers close what was idle for five seconds
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(keepalive_timeout=4.0), headers=servers[0].headers
    ) as http:
        client = ReplicaClient(http, name="engine-0", urls=[server.url for server in servers])
        registration = ReaderRegistration(load_recipe(NAME).value.handoff, run.weights_dir, fans_out=False)
        await registration.register(client, limit_s=LIMIT_S)
        yield client


async def update(replica: ReplicaClient, path: Path, version: int) -> None:
    """As `hpcrl.rollouts.weights.updates` does it."""
    info = {"path": str(path), "fallback": False}
    await begin(replica, limit_s=LIMIT_S)
    answer = await replica.control("/update_weights", {"update_info": {**info, "stage": True}}, timeout_s=LIMIT_S)
    assert "version" not in answer
    await wait_staged(replica, str(path), limit_s=LIMIT_S, call_s=LIMIT_S)
    await exchange(replica, info, version, pause=True, in_place=True, limit_s=LIMIT_S)


def prompt_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(7, 103) for _ in range(length)]


def ask(server: Server, seed: int, *, max_tokens: int = 20) -> tuple[list[int], Any]:
    prompt = prompt_of(40, seed)
    return prompt, generate(server, NAME, prompt, sampling={"max_tokens": max_tokens}, cache_salt=str(seed))


def long_answer(servers: list[Server]) -> int:
    """Tokens of a request that lasts long enough: both ranks and what else there is share the machine's cores."""
    began = time.monotonic()
    ask(servers[0], 1, max_tokens=20)
    least, most = LONG_TOKENS
    return min(most, max(least, int(20 * LONG_S / (time.monotonic() - began))))


def errors(servers: list[Server], model: Decoder, seed: int) -> list[float]:
    """Of each rank, all asked at once: the largest difference from the model's own log-probabilities."""
    with ThreadPoolExecutor(len(servers)) as pool:
        asked = [pool.submit(ask, server, seed + i) for i, server in enumerate(servers)]
        answers = [each.result() for each in asked]
    found = []
    for prompt, choice in answers:
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        found.append(logprob_error(model, prompt, choice["token_ids"], logprobs))
    return found


def test_each_rank_answers_as_the_one_model_does(servers: list[Server], tiny: tuple[Path, Decoder]) -> None:
    """Each has half of the experts, and gets the rest of a layer from the other."""
    for seed in (10, 20):
        assert max(errors(servers, tiny[1], seed)) < TOLERANCE
    # one alone: the other takes part without a request of its own
    for server in servers:
        assert max(errors([server], tiny[1], 30)) < TOLERANCE


@pytest.mark.parametrize("busy", [(0, 1), (1,), ()], ids=["both", "one", "idle"])
async def test_an_update_in_place_reaches_all_ranks_with_requests_in_flight(
    replica: ReplicaClient, servers: list[Server], run: RunDir, busy: tuple[int, ...]
) -> None:
    version = 10 + len(busy)
    new = random_model(servers[0].model.arch, seed=version)
    handoff = publish(HandoffStore(run.weights_dir), version, servers[0].model_dir, tensors_of(new))
    before = await replica.weight_labels(timeout_s=LIMIT_S)
    assert len({*before}) == 1
    tokens = await asyncio.to_thread(long_answer, servers)
    with ThreadPoolExecutor(max(1, len(busy))) as pool:
        flying = [pool.submit(ask, servers[rank], 900 + rank, max_tokens=tokens) for rank in busy]
        for rank in busy:
            while servers[rank].metrics()["vllm:num_requests_running"] < 1:  # bounded by the test's own limit
                await asyncio.sleep(0.05)
        await update(replica, handoff.path, version)
        for each in flying:
            spans = (await asyncio.wrap_future(each))[1]["weight_versions"]
            assert [span["version"] for span in spans] == [before[0], str(version)]
            assert spans[-1]["end"] == tokens
    assert await replica.weight_labels(timeout_s=LIMIT_S) == [str(version)] * RANKS
    found = await asyncio.to_thread(errors, servers, new, 100 * version)
    assert max(found) < TOLERANCE
    readers = ReaderWatch(run.weights_dir, expiry_s=60.0).observe()
    assert {(reader.reader, reader.acknowledged) for reader in readers} == {
        ("engine-0-0", version),
        ("engine-0-1", version),
    }
    # a rank reads the experts that it holds: of eight, with three matrices in each layer, the other has four
    others = 4 * 3 * new.arch.num_hidden_layers
    for server in servers:
        assert re.findall(rf"v{version:06d}: .* other ranks' (\d+)", server.log.read_text()) == [str(others)]


async def test_no_rank_is_stopped_for_a_torn_version(
    replica: ReplicaClient, servers: list[Server], run: RunDir
) -> None:
    before = await replica.weight_labels(timeout_s=LIMIT_S)
    torn = publish(HandoffStore(run.weights_dir), 50, servers[0].model_dir, tensors_of(servers[0].model))
    # of a tensor that both ranks hold
    record = torn.manifest.tensors["model.norm.weight"]
    with (torn.path / record.file).open("r+b") as stream:
        stream.seek(record.offset)
        byte = stream.read(1)[0]
        stream.seek(record.offset)
        stream.write(bytes([byte ^ 1]))
    with pytest.raises(EngineError, match=r"rank 0: .* \(and 1 other ranks\)"):
        await update(replica, torn.path, 50)
    assert not await replica.is_paused(timeout_s=LIMIT_S)
    assert await replica.weight_labels(timeout_s=LIMIT_S) == before
    # what that attempt has left on the ranks does not stop the next
    new = random_model(servers[0].model.arch, seed=51)
    handoff = publish(HandoffStore(run.weights_dir), 51, servers[0].model_dir, tensors_of(new))
    await update(replica, handoff.path, 51)
    found = await asyncio.to_thread(errors, servers, new, 5100)
    assert max(found) < TOLERANCE


async def test_what_only_one_rank_has_loaded_is_made_good_by_the_next_attempt(
    replica: ReplicaClient, servers: list[Server], run: RunDir
) -> None:
    new = random_model(servers[0].model.arch, seed=60)
    handoff = publish(HandoffStore(run.weights_dir), 60, servers[0].model_dir, tensors_of(new))
    info = {"path": str(handoff.path), "fallback": False}
    await begin(replica, limit_s=LIMIT_S)
    await replica.control("/update_weights", {"update_info": {**info, "stage": True}}, timeout_s=LIMIT_S)
    await wait_staged(replica, info["path"], limit_s=LIMIT_S, call_s=LIMIT_S)
    await replica.freeze(timeout_s=LIMIT_S)
    await replica.servers[0].control("/update_weights", {"update_info": info}, timeout_s=LIMIT_S)
    await update(replica, handoff.path, 60)
    assert await replica.weight_labels(timeout_s=LIMIT_S) == ["60"] * RANKS
    found = await asyncio.to_thread(errors, servers, new, 6000)
    assert max(found) < TOLERANCE


async def test_frozen_ranks_compute_nothing(replica: ReplicaClient, servers: list[Server]) -> None:
    tokens = await asyncio.to_thread(long_answer, servers)
    with ThreadPoolExecutor(1) as pool:
        flying = pool.submit(ask, servers[0], 950, max_tokens=tokens)
        while servers[0].metrics()["vllm:num_requests_running"] < 1:
            await asyncio.sleep(0.05)
        await replica.freeze(timeout_s=LIMIT_S)
        counts = [server.metrics()["vllm:generation_tokens_total"] for server in servers]
        await asyncio.sleep(2.0)
        assert [server.metrics()["vllm:generation_tokens_total"] for server in servers] == counts
        assert not flying.done()
        await replica.control("/resume", timeout_s=LIMIT_S)
        assert len((await asyncio.wrap_future(flying))[1]["token_ids"]) == tokens


def test_requests_without_the_token_of_the_run_are_refused(servers: list[Server], run: RunDir) -> None:
    """Every path that vLLM has, whatever version of it that is, and some that it has not."""
    server, labels = servers[1], servers[1].get("/weight_info")
    documented = server.get("/openapi.json")[1]["paths"]
    calls = {
        (method.upper(), path.replace("{", "").replace("}", "")) for path, of in documented.items() for method in of
    }
    calls |= {("GET", "/metrics"), ("GET", "/docs"), ("GET", "/nothing"), ("POST", "/nothing"), ("OPTIONS", "/pause")}
    assert calls >= {("POST", "/collective_rpc"), ("POST", "/init_weight_transfer_engine"), ("POST", "/pause")}
    strangers = {401: ["", "Bearer", f"Bearer {'0' * 64}.1"]}
    strangers[403] = [
        Credentials(Credentials.of_run(run.path).token, attempt).headers["Authorization"] for attempt in (0, 2)
    ]
    # what vllm-router asks, which has no token, and vLLM answers with a status alone
    calls -= {("GET", "/health")}
    for status, given in strangers.items():
        for authorization in given:
            for method, path in sorted(calls):
                with server.request(method, path, None, {"authorization": authorization}) as answer:
                    assert answer.status == status, (method, path, authorization)
            with server.request("GET", "/health", None, {"authorization": authorization}) as answer:
                assert (answer.status, answer.read()) == (200, b"")
    assert server.get("/is_paused") == (200, {"is_paused": False})
    assert server.get("/weight_info") == labels
    refused = read_events(run, attempt=1, kind="access.refused")
    assert {event.data["server"] for event in refused} == {"vllm"}


def test_a_call_cannot_say_where_an_engine_reads(servers: list[Server], run: RunDir, tmp_path: Path) -> None:
    reader = {"name": "engine-0-1", "expiry_s": 60.0, "floor_s": 9.0, "min_bytes_per_s": 1.0, "streams": 1}
    for info, what in (
        ({"root": str(tmp_path)}, "root"),
        ({"reader": {**reader, "name": "engine-7"}}, "name"),
        ({"reader": {**reader, "cache_dir": str(tmp_path)}}, "cache_dir"),
        ({"reader": {**reader, "fanout_host": "10.0.0.9"}}, "fanout_host"),
    ):
        status, answer = servers[1].call("/init_weight_transfer_engine", {"init_info": info})
        assert status >= 400, (info, answer)
        assert f"was started with {what}" in servers[1].log.read_text()
    # from elsewhere nothing is loaded, either
    new = random_model(servers[0].model.arch, seed=70)
    elsewhere = publish(HandoffStore(tmp_path / "weights"), 70, servers[0].model_dir, tensors_of(new))
    for server in servers:
        server.ok("/start_weight_update", {})
    status, answer = servers[1].call("/update_weights", {"update_info": {"path": str(elsewhere.path)}})
    assert status >= 400, answer
    assert not list(tmp_path.glob("weights/.readers/*"))
    for server in servers:
        server.call("/collective_rpc", {"method": "abandon_weight_update"})
