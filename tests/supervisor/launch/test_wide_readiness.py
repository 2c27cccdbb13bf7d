"""A replica with several servers: where they are, when all of them are ready, and how the silence of one shows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from patience import patience
from supervisor_testing import end_everything, make_plan, start, wait_ended

from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.config.plan import HttpProbe, Role, WatchPolicy
from hpcrl.inference.vllm.front import servers_of
from hpcrl.jobplan.groups import make_groups
from hpcrl.network.auth import Gate
from hpcrl.network.credentials import TOKEN_FILE, Credentials
from hpcrl.network.http_server import stop_serving
from hpcrl.runs.role import Endpoints, Member
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunState
from hpcrl.supervisor.launch.readiness import Prober
from hpcrl.supervisor.launch.replica_launcher import Address, LocalLauncher
from hpcrl.supervisor.process.node_values import fill_node_rank
from hpcrl.supervisor.recovery.watchdog import ProgressSample, Pulses, Watchdog
from hpcrl.supervisor.replicas.component import Component

HOST = "127.0.0.1"


# -- addresses


def test_servers_of_a_replica_are_on_all_of_its_nodes_in_the_order_of_ranks() -> None:
    groups = make_groups(load_recipe("glm5_swe").value, load_cluster("h200-28").value, "night-1")
    by_role = {group.role: group for group in groups}
    nodes = ("n3", "n4")
    address = Address.of(by_role[Role.PREFILL], ["10.0.0.3", "10.0.0.4"], 20100, nodes=nodes)
    assert address.url == "http://10.0.0.3:20100"
    assert address.nodes == nodes
    assert address.urls == tuple(f"http://10.0.0.{node}:{20100 + i}" for node in (3, 4) for i in range(8))
    # ranks of the trainer are no servers, and one server is none of several
    assert Address.of(by_role[Role.TRAINER], [f"t{i}" for i in range(12)], 1).urls == ("http://t0:1",)
    assert Address.of(by_role[Role.ROUTER], ["r"], 5).servers == ()


def test_servers_listen_on_the_address_of_their_node() -> None:
    groups = make_groups(load_recipe("glm5_swe").value, load_cluster("h200-28").value, "night-1")
    words = next(group.command for group in groups if group.role is Role.DECODE)
    hosts = [f"10.0.0.{node}" for node in range(8)]
    filled = [fill_node_rank(word, 5, hosts) for word in words]
    assert filled[filled.index("--host") + 1] == "10.0.0.5"
    assert "{node_host}" not in " ".join(filled)


def test_endpoints_name_all_servers(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    attempt = run.start_attempt()
    wide = ("http://a:1", "http://a:2")
    Endpoints(
        urls={"prefill": ["http://a:1"], "decode": ["http://b:1"]},
        servers={"prefill": [wide]},
        members={"engine": [Member(3, 1, "http://a:1", wide)]},
    ).write(run, attempt)
    read = Endpoints.read(run, attempt)
    assert read.fixed("prefill") == [Member(0, 1, "http://a:1", wide)]
    assert read.fixed("decode") == [Member(0, 1, "http://b:1")]
    assert read.fixed("engine") == []
    assert read.members["engine"][0].servers == wide
    assert len({*read.members["engine"], Member(3, 2, "http://a:1", wide)}) == 2, "another start is another member"
    # the router of two sides sends to each rank by itself
    assert servers_of(read, "prefill") == list(wide)
    assert servers_of(read, "decode") == ["http://b:1"]
    # files of before had no such field
    path = Endpoints.path(run, attempt)
    path.write_text(json.dumps({"urls": {"engine": ["http://a:1"]}}))
    assert Endpoints.read(run, attempt).fixed("engine") == [Member(0, 1, "http://a:1")]


# -- readiness


#: of the first attempt of a run
CREDENTIALS = Credentials("5" * 64, 1)


class Server:
    """Answers ``/health`` and ``/metrics`` to who brings the token; ``status`` and ``tokens`` may be changed."""

    def __init__(self) -> None:
        self.status, self.tokens, self.running = 200, 0, 1
        self.port = 0

    async def start(self) -> None:
        app = web.Application(middlewares=[Gate("server", CREDENTIALS).middleware()])
        app.add_routes([web.get("/health", self._health), web.get("/metrics", self._metrics)])
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, HOST, 0)
        await site.start()
        assert site._server is not None
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]

    async def stop(self) -> None:
        await stop_serving(self._runner)

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=self.status)

    async def _metrics(self, _: web.Request) -> web.Response:
        lines = [
            f"vllm:num_requests_running {self.running}",
            "vllm:num_requests_waiting 0",
            f"vllm:generation_tokens_total {self.tokens}",
        ]
        return web.Response(text="\n".join(lines) + "\n")


@pytest.fixture
async def servers() -> AsyncIterator[list[Server]]:
    made = [Server(), Server(), Server()]
    for server in made:
        await server.start()
    yield made
    for server in made:
        await server.stop()


def address_of(servers: list[Server]) -> Address:
    ports = tuple((HOST, server.port) for server in servers)
    return Address(HOST, servers[0].port, servers=ports)


async def test_a_replica_is_ready_when_all_of_its_servers_are(servers: list[Server], tmp_path: Path) -> None:
    servers[1].status = servers[2].status = 503
    prober = Prober(
        HttpProbe(path="/health"),
        address=address_of(servers),
        ready_file=tmp_path / "x",
        credentials=CREDENTIALS,
    )
    waiting = asyncio.create_task(prober.wait())
    # until all were asked: the first look may find some that have not answered yet
    first, second = (f"GET http://{HOST}:{server.port}/health answered 503" for server in servers[1:])
    await said(prober, first, "1 other of 3 servers")
    assert not waiting.done()
    servers[1].status = 200
    await said(prober, second)
    assert not waiting.done()
    servers[2].status = 200
    await asyncio.wait_for(waiting, 10.0 * patience())


async def said(prober: Prober, *parts: str) -> None:
    """Wait until the problem has all of the words."""
    async with asyncio.timeout(10.0 * patience()):
        while not all(part in prober.problem for part in parts):
            await asyncio.sleep(0.02)


@pytest.fixture
def run_of(tmp_path: Path) -> Iterator[Callable[..., RunDir]]:
    started: list[RunDir] = []

    def begin(**changes: object) -> RunDir:
        started.append(start(tmp_path / str(len(started)), **changes))
        return started[-1]

    yield begin
    for run in started:
        end_everything(run)


@pytest.mark.e2e
def test_who_comes_after_a_replica_waits_for_its_last_server(run_of: Callable[..., RunDir]) -> None:
    run = run_of(engine="serve-ranks", servers=2, trainer="finish")
    view = wait_ended(run)
    assert view.state is RunState.COMPLETED
    engine, trainer = view.components
    assert engine.ready_at_s is not None
    assert engine.started_at_s is not None
    assert trainer.started_at_s is not None
    assert engine.ready_at_s - engine.started_at_s > 1.4
    assert trainer.started_at_s >= engine.ready_at_s
    endpoints = Endpoints.read(run, 1)
    first = endpoints.urls["engine"][0]
    host, _, port = first.rpartition(":")
    assert endpoints.servers == {"engine": [(first, f"{host}:{int(port) + 1}")]}


@pytest.mark.e2e
def test_a_replica_whose_last_server_does_not_come_is_not_a_replica(run_of: Callable[..., RunDir]) -> None:
    # time for the first server to answer: it is the second one that the message must name
    limit_s = round(5.0 * patience(), 1)
    run = run_of(engine="serve-noted", servers=2, start_timeout_s=limit_s)
    view = wait_ended(run)
    assert view.state is RunState.FAILED
    assert view.cause is not None
    assert f"engine 0 was not ready after {limit_s:g} s" in view.cause.message
    second = int(Endpoints.read(run, 1).urls["engine"][0].rpartition(":")[2]) + 1
    assert f":{second}/health" in view.cause.message


# -- progress


def sign(tokens: float, *, work: float = 1.0) -> ProgressSample:
    return ProgressSample((tokens,), False, "", pauses=work == 0, begun=tokens > 0, tokens=tokens, work=work)


def test_progress_of_one_server_does_not_stand_for_another() -> None:
    pulses = Pulses(WatchPolicy(floor_s=10.0, ceiling_s=60.0), 0.0, servers=2)
    for second in range(12):
        assert pulses.see([sign(second), sign(5)], float(second)) or second == 0
    assert not pulses.problem(9.0)
    assert pulses.problem(11.0).startswith("rank 1 of 2: no progress")
    # one without requests need not sample, and one that does not answer is found by that
    pulses = Pulses(WatchPolicy(floor_s=10.0, ceiling_s=60.0), 0.0, servers=2)
    for second in range(12):
        pulses.see([sign(second), sign(5, work=0)], float(second))
    assert not pulses.problem(11.0)
    for second in range(12, 24):
        pulses.see([sign(second), None], float(second))
    assert "rank 1 of 2: it has not answered" in pulses.problem(23.0)


async def test_the_watchdog_finds_a_silent_server(servers: list[Server], tmp_path: Path) -> None:
    group = make_plan(tmp_path / "run", servers=3).group(Role.ENGINE)
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    run.start_attempt()
    (run.path / TOKEN_FILE).write_text(CREDENTIALS.token)
    component = Component(group, 0, address=address_of(servers), log="", on_change=lambda _: None)
    watchdog = Watchdog(
        run, attempt=1, policy=WatchPolicy(), components=[component], on_hung=lambda component, problem: None
    )
    servers[0].tokens, servers[1].tokens = 5, 7
    async with aiohttp.ClientSession() as stranger:
        assert await watchdog._look(component, stranger) == [None, None, None]
    async with watchdog._session(aiohttp.ClientTimeout(total=5.0)) as session:
        signs = await watchdog._look(component, session)
        assert [None if sign is None else sign.tokens for sign in signs] == [5, 7, 0]
        await servers[2].stop()
        signs = await watchdog._look(component, session)
        await servers[2].start()
    assert [sign is None for sign in signs] == [False, False, True]


def test_local_servers_of_a_replica_have_neighbouring_ports(tmp_path: Path) -> None:
    plan = make_plan(tmp_path / "run", servers=2, replicas=2)
    placed = LocalLauncher().place(plan)
    urls = [url for replica in range(2) for url in placed[Role.ENGINE, replica].urls]
    assert len(set(urls)) == 4
    assert placed[Role.TRAINER, 0].servers == ()
