"""Replicas of several ranks with a server each: they are updated, lost and judged as one, and none computes alone."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from harness import Loop, impatient, make_run, running, servers_of, urls_of
from stub_engine import StubEngine
from stub_replica import StubRank, stub_replica

from hpcrl.rollouts.core.counters import Counters
from hpcrl.rollouts.engines import pool as engine_pool
from hpcrl.rollouts.engines.client import EngineClient, EngineError, SamplingParams
from hpcrl.rollouts.engines.replica_client import ReplicaClient, client_of
from hpcrl.rollouts.engines.routed_pool import RoutedPool
from hpcrl.rollouts.engines.router_client import RouterClient, Worker
from hpcrl.rollouts.telemetry import deadlines, fleet_watch
from hpcrl.rollouts.telemetry.run_metrics import MetricsPart, merge_metrics
from hpcrl.rollouts.weights import membership
from hpcrl.rollouts.weights import updates as weight_updates
from hpcrl.runs.events import EventWriter
from hpcrl.runs.fleet import EngineView, FleetView
from hpcrl.runs.role import Complaint
from hpcrl.runs.rundir import RunDir

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, seed=0, stop_token_ids=[2])


@pytest.fixture(autouse=True)
def quick(monkeypatch: Any) -> Iterator[None]:
    """Looks and retries in tenths of a second."""
    impatient(monkeypatch, lost_after_s=20.0)
    monkeypatch.setattr(engine_pool, "_SILENT_S", 0.5)
    monkeypatch.setattr(weight_updates, "HEALTH_S", 0.3)
    monkeypatch.setattr(fleet_watch, "LOOK_S", 0.05)
    monkeypatch.setattr(deadlines, "SUSPECT_S", 1.5)
    monkeypatch.setattr(membership, "_LOOK_S", 0.05)
    return


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


def kinds(loop: Loop, kind: str) -> list[str]:
    return [event.data["engine"] for event in loop.events(kind)]


def dropped(loop: Loop) -> int:
    counters = loop.parts.counters
    return counters.dropped_engine + counters.dropped_environment + counters.dropped_group


def violations(*replicas: list[StubRank]) -> list[str]:
    return [violation for replica in replicas for rank in replica for violation in rank.violations]


def view(loop: Loop, replica: int) -> EngineView:
    found = FleetView.read(loop.run, loop.attempt)
    engine = None if found is None else found.engine(replica)
    return EngineView(replica=replica, version=-2) if engine is None else engine


def stop_count(rank: StubRank) -> int:
    return rank.calls.count("pause")


# -- updates


async def test_ranks_change_their_weights_together_with_requests_in_flight(tmp_path: Path) -> None:
    one, two = stub_replica(), stub_replica(ranks=3)
    for rank in (*one, *two):
        rank.request_s, rank.token_s, rank.exchange_s = 0.01, 0.005, 0.02
    two[2].update_s = 0.3  # one rank reads slowly: the others go on generating until it has read
    async with running(make_run(tmp_path), one, two) as loop:
        await loop.train(1, 6)
        await loop.until(lambda: loop.parts.pool.version == 6)
        assert dropped(loop) == 0
        assert {event.data["engine"] for event in loop.events("engine.weights_updated")} == {"engine-0", "engine-1"}
    assert violations(one, two) == []
    assert {rank.version for rank in (*one, *two)} == {"6"}
    for replica in (one, two):
        # all ranks are stopped the same number of times, and all of them answer requests
        assert len({stop_count(rank) for rank in replica}) == 1
        where: dict[str, set[int]] = defaultdict(set)
        for number, rank in enumerate(replica):
            assert rank.requests, f"rank {number} got nothing"
            for request in rank.requests:
                where[request["session"]].add(number)
        assert all(len(ranks) == 1 for ranks in where.values()), "a session stays where its prefix is"


async def test_no_rank_stops_for_a_version_that_one_of_them_could_not_read(tmp_path: Path) -> None:
    ranks = stub_replica()
    async with running(make_run(tmp_path), ranks) as loop:
        await loop.train(1, 2)
        await loop.until(lambda: loop.parts.pool.version == 2)
        stops, starts = [stop_count(rank) for rank in ranks], ranks[0].calls.count("start_weight_update")
        ranks[1].bad_reads = 2
        await loop.publish(3)
        await loop.until(lambda: loop.parts.pool.version == 3)
        # two attempts ended before the freeze, the third was the only one that felt like an update
        assert [stop_count(rank) for rank in ranks] == [count + 1 for count in stops]
        assert ranks[0].calls.count("start_weight_update") == starts + 3
    assert violations(ranks) == []
    assert ranks[1].bad_reads < 0


async def test_a_replica_stays_frozen_until_all_ranks_have_the_version(tmp_path: Path) -> None:
    """A rank with the new weights would compute with the experts of one that has the old."""
    ranks = stub_replica()
    for rank in ranks:
        rank.request_s, rank.token_s = 0.02, 0.005
    async with running(make_run(tmp_path), ranks) as loop:
        await loop.train(1, 2)
        await loop.until(lambda: loop.parts.pool.version == 2)
        ranks[1].fail_exchanges = 2
        await loop.train(3, 5)
        await loop.until(lambda: loop.parts.pool.version == 5)
        # after the two that failed nobody went on
        assert [stop_count(rank) - rank.calls.count("resume") for rank in ranks] == [2, 2]
        assert dropped(loop) == 0
        assert not loop.events("engine.away")
    assert violations(ranks) == []


async def test_ranks_that_wait_for_each_other_endlessly_are_named(tmp_path: Path) -> None:
    """Their servers say that they are well: only a new start of the replica helps."""
    run = make_run(tmp_path, handoff={"update_timeout_s": 1.0})
    ranks, other = stub_replica(), StubEngine()
    async with running(run, ranks, other) as loop:
        await loop.train(1, 2)
        ranks[1].deaf = True
        await loop.publish(3)

        def complaints() -> list[Complaint]:
            return [each for each in Complaint.read_all(loop.run, loop.attempt) if each.replica == 0]

        await loop.until(complaints, 20.0)
        assert complaints()[0].role == "engine"
        assert "rank" in complaints()[0].message
        assert "/pause" in complaints()[0].message
        for rank in ranks:
            rank.deaf = False
            await rank.restart()
        await loop.train(3, 5)
        await loop.until(lambda: {rank.version for rank in ranks} == {"5"}, 20.0)
        assert dropped(loop) == 0
    assert violations(ranks) == []


# -- failures


async def test_a_replica_without_one_of_its_ranks_serves_nothing(tmp_path: Path) -> None:
    ranks, other = stub_replica(), StubEngine()
    for server in servers_of([ranks, other]):
        server.request_s = 0.05
    async with running(make_run(tmp_path), ranks, other) as loop:
        await loop.train(1, 2)
        await ranks[1].stop()
        await loop.until(lambda: kinds(loop, "engine.away") == ["engine-0"])
        await loop.until(lambda: ranks[0].in_flight == 0)
        count = len(ranks[0].requests)
        await loop.train(3, 5)
        assert len(ranks[0].requests) == count
        assert not view(loop, 0).answers
        # as the supervisor does: the whole replica is started again
        for rank in ranks:
            await rank.restart()
        await loop.until(lambda: {rank.version for rank in ranks} == {"5"})
        await loop.train(6, 9)
        await loop.until(lambda: all(rank.requests for rank in ranks))
        served = {int(request["served"]) for rank in ranks for request in rank.requests}
        assert served <= set(range(5, 10))
        assert dropped(loop) == 0
    assert violations(ranks) == []


async def test_a_rank_with_other_weights_makes_the_whole_replica_begin_anew(tmp_path: Path) -> None:
    ranks, other = stub_replica(), StubEngine()
    async with running(make_run(tmp_path), ranks, other) as loop:
        await loop.train(1, 2)
        await loop.until(lambda: loop.parts.pool.version == 2)
        ranks[1].version = "initial"
        await loop.until(lambda: kinds(loop, "engine.away") == ["engine-0"])
        assert "'initial'" in loop.events("engine.away")[0].data["why"]
        await loop.until(lambda: ranks[1].version == "2")
        await loop.train(3, 4)


async def test_a_late_replica_joins_with_all_of_its_ranks(tmp_path: Path) -> None:
    one, late = stub_replica(), stub_replica()
    async with running(make_run(tmp_path), one, elastic=True, later=[late]) as loop:
        await loop.train(1, 3)
        loop.tell_members(one, late)
        await loop.until(lambda: {rank.version for rank in late} == {"3"})
        await loop.train(4, 8)
        await loop.until(lambda: all(rank.requests for rank in late))
        assert kinds(loop, "engine.added") == ["engine-1"]
        assert "initial" not in {request["served"] for rank in late for request in rank.requests}
        loop.tell_members(one)
        await loop.until(lambda: kinds(loop, "engine.removed") == ["engine-1"])
        await loop.train(9, 10)
    assert violations(one, late) == []


# -- health


async def test_a_silent_rank_is_not_hidden_by_those_that_sample(tmp_path: Path) -> None:
    ranks, other = stub_replica(), StubEngine()
    for server in servers_of([ranks, other]):
        server.request_s = 0.05
    async with running(make_run(tmp_path, rollouts={"request_timeout_s": 600.0}), ranks, other) as loop:
        await loop.train(1, 2)
        ranks[1].hung = True
        batch = asyncio.create_task(loop.train(3, 5))
        await loop.until(lambda: view(loop, 0).stuck, 20.0)
        assert (view(loop, 0).servers, view(loop, 0).silent_rank) == (2, 1)
        ranks[1].hung = False
        await loop.until(lambda: not view(loop, 0).stuck, 20.0)
        assert view(loop, 0).silent_rank is None
        await asyncio.wait_for(batch, 120.0)


async def test_load_is_that_of_all_ranks_or_not_known(tmp_path: Path) -> None:
    ranks = stub_replica()
    for rank in ranks:
        rank.request_s = 1.0
        rank.slots = 4
    async with running(make_run(tmp_path), ranks) as loop:

        def both() -> tuple[int, int]:
            return view(loop, 0).running or 0, view(loop, 0).waiting or 0

        # 32 rollouts are in flight: a rank alone could run no more than four of them, and has half of all
        await loop.until(lambda: both()[0] > 4 and sum(both()) > 16)
        ranks[1].mute = True
        await loop.until(lambda: view(loop, 0).running is None)
        assert view(loop, 0).tokens_per_s is None
        ranks[1].mute = False
        await loop.until(lambda: view(loop, 0).running is not None)


async def test_metrics_of_the_run_have_each_rank(tmp_path: Path) -> None:
    ranks = stub_replica()
    async with running(make_run(tmp_path), ranks) as loop:
        await loop.train(1, 1)
        ranks[1].mute = True
        text = await loop.orchestrator.run_metrics()
    assert 'hpcrl_part_up{role="engine",replica="0",rank="0"} 1' in text
    assert 'hpcrl_part_up{role="engine",replica="0",rank="1"} 0' in text
    assert 'vllm:num_requests_running{role="engine",replica="0",rank="0",engine="0"}' in text


def test_samples_of_ranks_differ_by_their_rank() -> None:
    one, two = MetricsPart("decode", 0, "", 0), MetricsPart("decode", 0, "", 1)
    text = merge_metrics([(one, 'vllm:x{engine="0"} 1\n'), (two, 'vllm:x{engine="0"} 2\n')])
    assert 'vllm:x{role="decode",replica="0",rank="1",engine="0"} 2' in text.splitlines()


# -- the router


class StubRouter(RouterClient):
    """A router in this process; ``refused`` are servers that it does not take."""

    def __init__(self) -> None:
        self.name, self.url = "router", "http://router"
        self.known: dict[str, Worker] = {}
        self.refused: set[str] = set()

    async def workers(self, *, timeout_s: float) -> dict[str, Worker]:
        return dict(self.known)

    async def add(self, url: str, *, timeout_s: float) -> None:
        if url in self.refused:
            raise EngineError(f"{url} is not healthy", status=503)
        self.known[url] = Worker(url, load=3)

    async def remove(self, url: str, *, timeout_s: float) -> None:
        del self.known[url]


def routed_pool(run: RunDir, router: RouterClient, clients: list[EngineClient]) -> RoutedPool:
    return RoutedPool(
        clients,
        router=router,
        events=EventWriter(run, attempt=1, writer="test"),
        counters=Counters(),
        request_timeout_s=1.0,
        max_retries=0,
    )


async def test_the_router_gets_all_servers_of_a_replica_or_none(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    router, run = StubRouter(), make_run(tmp_path)
    urls = [f"http://127.0.0.1:{port}" for port in range(4)]
    whole = client_of(http, name="engine-0", url=urls[0], servers=urls[:3])
    single = client_of(http, name="engine-1", url=urls[3], servers=())
    pool = routed_pool(run, router, [whole, single])
    for engine in pool.engines:
        engine.serve(4, proved_s=0.0)
        engine.end_exchange()
    router.refused = {urls[2]}
    assert await pool._reconcile()
    assert set(router.known) == {urls[3]}
    assert [pool.routed(engine) for engine in pool.engines] == [False, True]
    router.refused = set()
    assert await pool._reconcile()
    assert set(router.known) == set(urls)
    assert not await pool._reconcile()
    assert [engine.load for engine in pool.engines] == [9, 3]
    await pool.lose(pool.engines[0], "a rank is gone")
    assert await pool._reconcile()
    assert set(router.known) == {urls[3]}


@pytest.mark.timeout(120)
async def test_who_waits_for_engines_that_do_not_answer_lets_others_go_on(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    """A new rollout finds out that no engine behind the router serves before the watch has said so."""
    engine = client_of(http, name="engine-0", url="http://127.0.0.1:1", servers=())
    pool = routed_pool(make_run(tmp_path), StubRouter(), [engine])
    pool.engines[0].serve(4, proved_s=0.0)
    pool.engines[0].end_exchange()
    assert await pool._reconcile()
    await pool.notify()
    session = pool.session("a")
    assert await pool.settle(session) is pool.front
    pool.engines[0].silent(refused=False)
    assert not pool._one_version()
    waiting = asyncio.create_task(pool.settle(session))
    done, _ = await asyncio.wait({waiting}, timeout=0.2)
    assert not done
    pool.engines[0].answered()
    await pool.notify()
    assert await asyncio.wait_for(waiting, 60.0) is pool.front


# -- the client


async def test_a_client_of_one_server_is_that_of_an_engine(http: aiohttp.ClientSession) -> None:
    client = client_of(http, name="engine-0", url="http://h:1", servers=())
    assert type(client) is EngineClient
    assert client.servers == (client,)


async def test_sessions_are_spread_over_ranks_and_stay(http: aiohttp.ClientSession) -> None:
    ranks = stub_replica(ranks=3)
    for rank in ranks:
        await rank.start()
        rank.version = "0"
    client = ReplicaClient(http, name="engine-0", urls=urls_of(ranks))
    for _ in range(2):
        for session in range(9):
            await client.generate([10], GREEDY, cache_salt="0", session_id=str(session), timeout_s=5.0)
    for rank in ranks:
        assert len(rank.requests) == 6
        assert len({request["session"] for request in rank.requests}) == 3
        await rank.stop()


async def test_what_servers_answer_differently_is_an_error(http: aiohttp.ClientSession) -> None:
    ranks = stub_replica()
    for rank in ranks:
        await rank.start()
    client = ReplicaClient(http, name="engine-0", urls=urls_of(ranks))
    for rank, version in zip(ranks, ("3", "4"), strict=True):
        rank.in_place, rank.version = False, version
    call = {"update_info": {"path": "/weights/v000009", "stage": True}}
    ranks[1].torn = True
    with pytest.raises(EngineError, match=r"rank 1 answers /update_weights with .*4"):
        await client.control("/update_weights", call, timeout_s=5.0)
    for rank in ranks:
        await rank.stop()


async def test_a_problem_says_which_server_has_it(http: aiohttp.ClientSession) -> None:
    ranks = stub_replica(ranks=3)
    for rank in ranks:
        await rank.start()
    client = ReplicaClient(http, name="engine-0", urls=urls_of(ranks))
    assert await client.problem(timeout_s=5.0) is None
    assert await client.weight_labels(timeout_s=5.0) == ["initial"] * 3
    await ranks[1].stop()
    ranks[2].awake.clear()
    problem = await client.problem(timeout_s=2.0)
    assert problem is not None
    # nobody listens at rank 1: that counts more than the silence of rank 2
    assert (problem.refused, problem.unreachable) == (True, True)
    assert "2 of 3 servers are not healthy" in str(problem)
    assert "engine-0 rank 1" in str(problem)
    assert await client.weight_labels(timeout_s=2.0) == ["initial", None, None]
    ranks[2].awake.set()
    for rank in ranks:
        await rank.stop()


async def test_the_first_failure_ends_a_call_that_the_others_wait_in(http: aiohttp.ClientSession) -> None:
    ranks = stub_replica()
    for rank in ranks:
        await rank.start()
    await ranks[1].stop()
    client = ReplicaClient(http, name="engine-0", urls=urls_of(ranks))
    # rank 0 would wait for rank 1 until the end of its time
    with pytest.raises(EngineError) as error:
        await asyncio.wait_for(client.freeze(timeout_s=600.0), 120.0)
    assert error.value.refused
    await ranks[0].stop()
