"""The orchestrator behind each real router, with stub engines: who may be chosen, and what is lost with whom."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import Loop, Replica, impatient, make_run, running, servers_of
from patience import patience
from real_router import Router
from stub_engine import EOS, StubEngine, encode
from stub_replica import stub_replica

from hpcrl.rollouts.engines import pool as engine_pool
from hpcrl.rollouts.engines import routed_pool
from hpcrl.rollouts.telemetry import deadlines, fleet_watch
from hpcrl.runs.fleet import EngineView, FleetView

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

ALPHABET = encode("abcdefghijklmnopqrstuvwxyz0123456789")


def alphabet(token_ids: list[int], seed: int) -> list[int]:
    """An answer that says the alphabet, from where the prompt has got to."""
    said = next((n for n in range(len(ALPHABET), 0, -1) if token_ids[-n:] == ALPHABET[:n]), 0)
    return [*ALPHABET[said:], EOS]


@pytest.fixture(params=["vllm-router", "dynamo"])
def router(tmp_path: Path, request: Any) -> Iterator[Router]:
    router = Router(tmp_path / "router.log", request.param)
    router.start()
    yield router
    router.kill()


@pytest.fixture(autouse=True)
def quick(monkeypatch: Any) -> None:
    """Looks and retries in tenths of a second; on a busy machine engines that are well take longer to show it."""
    impatient(monkeypatch, lost_after_s=60.0)
    monkeypatch.setattr(engine_pool, "_SILENT_S", 0.5 * patience())
    monkeypatch.setattr(routed_pool, "_BEHIND_S", 0.5 * patience())


@contextlib.asynccontextmanager
async def routed(path: Path, router: Router, *engines: Replica, **changes: Any) -> AsyncIterator[Loop]:
    for server in servers_of(engines):
        server.request_s = 0.02
    async with running(make_run(path, **changes), *engines, router=router.url) as loop:
        yield loop


def kinds(loop: Loop, kind: str) -> list[str]:
    return [event.data.get("engine", "router") for event in loop.events(kind)]


def dropped(loop: Loop) -> int:
    counters = loop.parts.counters
    return counters.dropped_engine + counters.dropped_environment + counters.dropped_group


async def test_groups_stay_on_an_engine_and_salts_are_of_one_version(tmp_path: Path, router: Router) -> None:
    one, two = StubEngine(), StubEngine()
    async with routed(tmp_path, router, one, two) as loop:
        await loop.train(1, 6)
        assert sorted(kinds(loop, "router.engine_added")) == ["engine-0", "engine-1"]
    where: dict[str, set[int]] = defaultdict(set)
    for number, stub in enumerate((one, two)):
        assert len(stub.requests) > 10, "the router spreads groups"
        for request in stub.requests:
            where[request["session"]].add(number)
            # the prompt is computed by the version of its salt, or a newer one that came while it was on its way
            assert int(request["cache_salt"].partition("-")[0]) <= int(request["served"])
    assert len(where) > 20
    assert all(len(numbers) == 1 for numbers in where.values())


async def test_new_rollouts_wait_until_all_engines_serve_one_version(tmp_path: Path, router: Router) -> None:
    """Else their salt would be wrong on one of the two."""
    one, two = StubEngine(), StubEngine()
    async with routed(tmp_path, router, one, two) as loop:
        await loop.train(1, 2)
        await loop.until(lambda: loop.parts.pool.version == 2)
        two.reads.clear()
        one.requests.clear()
        await loop.publish(3)
        await loop.until(lambda: one.version == "3")
        assert two.version == "2"
        await asyncio.sleep(0.3)
        assert not [request for request in one.requests if request["cache_salt"] == "3"]
        two.reads.set()
        await loop.until(lambda: two.version == "3")
        await loop.batch(3)
        await loop.train(4, 5)
        await loop.until(lambda: [request for request in one.requests if request["cache_salt"] >= "3"])


async def test_an_engine_that_falls_behind_gets_nothing_until_it_caught_up(tmp_path: Path, router: Router) -> None:
    one, two = StubEngine(), StubEngine()
    async with routed(tmp_path, router, one, two) as loop:
        await loop.train(1, 2)
        await loop.until(lambda: loop.parts.pool.version == 2)
        two.skip = 3
        await loop.publish(3)
        await loop.until(lambda: kinds(loop, "router.engine_removed") == ["engine-1"])
        two.requests.clear()
        await loop.train(3, 5)
        assert dropped(loop) == 0
        assert not [request for request in two.requests if request["served"] == "2" and request["cache_salt"] >= "3"]
        await loop.until(lambda: kinds(loop, "router.engine_added").count("engine-1") == 2)
        await loop.train(6, 7)
        await loop.until(lambda: [request for request in two.requests if request["served"] >= "5"])


async def test_a_killed_engine_comes_back_with_the_newest_version(tmp_path: Path, router: Router) -> None:
    one, two = StubEngine(), StubEngine()
    async with routed(tmp_path, router, one, two) as loop:
        await loop.train(1, 2)
        await one.stop()
        await loop.train(3, 5)
        assert kinds(loop, "router.engine_removed") == ["engine-0"]
        await one.restart()
        await loop.until(lambda: kinds(loop, "router.engine_added").count("engine-0") == 2)
        await loop.train(6, 9)
        await loop.until(lambda: one.requests)
        assert {int(request["served"]) for request in one.requests} <= set(range(5, 10))
        assert dropped(loop) == 0


async def test_tokens_that_arrived_through_the_router_are_kept(tmp_path: Path, router: Router) -> None:
    """The router hands parts on as they come, and cuts the answer when its engine is gone."""
    one, two = StubEngine(answer=alphabet), StubEngine(answer=alphabet)
    one.token_s = two.token_s = 0.05
    rollouts = {"stream_interval": 4, "sampling": {"max_new_tokens": 64}, "rollouts_per_step": 16, "max_in_flight": 16}
    async with routed(tmp_path, router, one, two, rollouts=rollouts) as loop:
        await loop.until(lambda: min(one.in_flight, two.in_flight) >= 4, 30.0)
        await loop.until(lambda: one.sampled >= 20 * one.in_flight, 30.0)
        cut = one.in_flight
        await one.stop()
        await loop.batch(1)
        counters = loop.parts.counters
        assert counters.tokens_kept >= 8 * cut
        said = {tuple(r.token_ids[r.sampled == 1].tolist()) for r in loop.last_rollouts()}
        assert said == {(*ALPHABET, EOS)}
        assert dropped(loop) == 0


async def test_a_silent_engine_gets_nothing_new_from_the_router(
    tmp_path: Path, router: Router, monkeypatch: Any
) -> None:
    """It answers all but requests. Its share of the load is seen meanwhile."""
    monkeypatch.setattr(fleet_watch, "LOOK_S", 0.05)
    monkeypatch.setattr(deadlines, "SUSPECT_S", 0.5)
    one, two = StubEngine(), StubEngine()
    async with routed(tmp_path, router, one, two) as loop:
        await loop.train(1, 2)
        one.hung = True
        batches = asyncio.create_task(loop.train(3, 4))
        await loop.until(lambda: kinds(loop, "router.engine_removed") == ["engine-0"], 30.0)

        def seen(replica: int) -> EngineView:
            view = FleetView.read(loop.run, loop.attempt)
            found = None if view is None else view.engine(replica)
            return EngineView(replica=replica, version=-1) if found is None else found

        await loop.until(lambda: seen(0).routed is False and seen(0).stuck)
        assert seen(1).routed
        one.requests.clear()
        await batches
        assert not [request for request in one.requests if request["session"] != "probe"]
        one.hung = False
        await loop.until(lambda: kinds(loop, "router.engine_added").count("engine-0") == 2, 30.0)
        assert dropped(loop) == 0


async def test_ranks_of_a_wide_replica_are_behind_the_router_all_or_none(tmp_path: Path, router: Router) -> None:
    wide, single = stub_replica(ranks=3), StubEngine()
    async with routed(tmp_path, router, wide, single) as loop:
        await loop.train(1, 6)
        # groups go to each of them, as to an engine of its own
        assert all(len(server.requests) > 5 for server in (*wide, single))
        await loop.until(lambda: loop.parts.pool.version == 6)
        await wide[1].stop()
        await loop.until(lambda: kinds(loop, "router.engine_removed") == ["engine-0"], 30.0)
        await loop.until(lambda: not any(rank.in_flight for rank in wide))
        for rank in wide:
            rank.requests.clear()
        await loop.train(7, 9)
        assert not [request for rank in wide for request in rank.requests]
        for rank in wide:
            await rank.restart()
        await loop.until(lambda: kinds(loop, "router.engine_added").count("engine-0") == 2, 30.0)
        await loop.train(10, 14)
        await loop.until(lambda: all(rank.requests for rank in wide))
        assert dropped(loop) == 0
    assert [violation for rank in wide for violation in rank.violations] == []


async def test_without_any_engine_rollouts_wait(tmp_path: Path, router: Router) -> None:
    stub = StubEngine()
    async with routed(tmp_path, router, stub) as loop:
        await loop.train(1, 2)
        await stub.stop()
        batch = asyncio.create_task(loop.train(3, 5))
        await loop.until(lambda: kinds(loop, "engine.away"))
        await asyncio.sleep(2.0)
        assert not batch.done()
        await stub.restart()
        await asyncio.wait_for(batch, 120.0)
        assert dropped(loop) == 0
        assert "initial" not in {request["served"] for request in stub.requests}


async def test_a_router_that_was_started_anew_learns_its_engines(tmp_path: Path, router: Router) -> None:
    one, two = StubEngine(), StubEngine()
    async with routed(tmp_path, router, one, two) as loop:
        await loop.train(1, 2)
        router.kill()
        batch = asyncio.create_task(loop.train(3, 6))
        await loop.until(lambda: kinds(loop, "router.away"))
        await asyncio.to_thread(router.start)
        await asyncio.wait_for(batch, 120.0)
        assert kinds(loop, "router.back") == ["router"]
        assert dropped(loop) == 0
        one.requests.clear()
        two.requests.clear()
        await loop.train(7, 8)
        assert one.requests
        assert two.requests


async def test_a_router_that_was_stopped_for_a_while_loses_nothing(tmp_path: Path, router: Router) -> None:
    one, two = StubEngine(), StubEngine()
    async with routed(tmp_path, router, one, two) as loop:
        await loop.train(1, 2)
        os.kill(router.process.pid, signal.SIGSTOP)
        batch = asyncio.create_task(loop.train(3, 4))
        await asyncio.sleep(1.0)
        os.kill(router.process.pid, signal.SIGCONT)
        await asyncio.wait_for(batch, 120.0)
        assert dropped(loop) == 0


async def test_a_cancelled_rollout_is_aborted_in_its_engine(tmp_path: Path, router: Router) -> None:
    stub = StubEngine()
    async with routed(tmp_path, router, stub) as loop:
        stub.request_s = 60.0
        await loop.until(lambda: stub.in_flight == loop.recipe.rollouts.max_in_flight)
        await loop.parts.scheduler.drain()
        await loop.until(lambda: stub.in_flight == 0)
        assert stub.aborted > 0
