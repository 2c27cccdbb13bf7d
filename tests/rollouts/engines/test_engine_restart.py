"""Engines that go away and come back: their rollouts go on elsewhere, and none is served by old weights."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from harness import Loop, impatient, make_run, running
from stub_engine import StubEngine

from hpcrl.errors import PeerLostError
from hpcrl.rollouts import parts as orchestrator_parts
from hpcrl.rollouts.core.counters import Counters
from hpcrl.rollouts.engines import pool as engine_pool
from hpcrl.rollouts.engines.client import EngineClient
from hpcrl.runs.role import Complaint


@pytest.fixture(autouse=True)
def quick(monkeypatch: Any) -> Iterator[None]:
    """Looks and retries in tenths of a second."""
    impatient(monkeypatch, lost_after_s=20.0)
    monkeypatch.setattr(engine_pool, "_SILENT_S", 0.5)
    return


def kinds(loop: Loop, kind: str) -> list[str]:
    return [event.data["engine"] for event in loop.events(kind)]


def dropped(loop: Loop) -> int:
    counters = loop.parts.counters
    return counters.dropped_engine + counters.dropped_environment + counters.dropped_group


async def test_a_killed_engine_comes_back_with_the_newest_version(tmp_path: Path) -> None:
    one, two = StubEngine(), StubEngine()
    one.request_s = two.request_s = 0.05
    async with running(make_run(tmp_path), one, two) as loop:
        await loop.train(1, 2)
        await one.stop()
        await loop.until(lambda: kinds(loop, "engine.away") == ["engine-0"])
        await loop.train(3, 5)  # the other engine does it alone, at every version
        await one.restart()
        await loop.until(lambda: one.version == "5")
        await loop.train(6, 9)
        await loop.until(lambda: one.requests)
        assert kinds(loop, "engine.back") == ["engine-0"]
        assert one.calls[0] == "init_weight_transfer_engine"
        assert {int(request["served"]) for request in one.requests} <= set(range(5, 10))
        assert dropped(loop) == 0


async def test_with_one_engine_its_rollouts_wait(tmp_path: Path) -> None:
    stub = StubEngine()
    async with running(make_run(tmp_path), stub) as loop:
        await loop.train(1, 2)
        await stub.stop()
        batch = asyncio.create_task(loop.train(3, 5))
        await loop.until(lambda: kinds(loop, "engine.away"))
        await asyncio.sleep(1.0)
        assert not batch.done()
        await stub.restart()
        await asyncio.wait_for(batch, 120.0)
        assert dropped(loop) == 0
        assert "initial" not in {request["served"] for request in stub.requests}


async def test_requests_of_a_silent_engine_are_sent_elsewhere(tmp_path: Path) -> None:
    one, two = StubEngine(), StubEngine()
    one.request_s = two.request_s = 0.05
    async with running(make_run(tmp_path, rollouts={"request_timeout_s": 600.0}), one, two) as loop:
        await loop.train(1, 1)
        one.awake.clear()
        await loop.train(2, 6)
        assert kinds(loop, "engine.away") == ["engine-0"]
        await one.restart()
        await loop.until(lambda: one.version.isdecimal() and int(one.version) >= 6)
        assert dropped(loop) == 0


async def test_an_engine_that_was_replaced_unseen_is_found(tmp_path: Path, monkeypatch: Any) -> None:
    """Between two looks, with no request on its way."""
    monkeypatch.setattr(engine_pool, "WATCH_S", 1.0)
    stub = StubEngine()
    async with running(make_run(tmp_path), stub) as loop:
        await loop.train(1, 3)
        await loop.until(lambda: loop.parts.pool.version == 3 and stub.in_flight == 0)
        await stub.restart()
        await loop.train(4, 6)
        assert kinds(loop, "engine.away") == ["engine-0"]
        asked_too_early = [request for request in stub.requests if request["served"] == "initial"]
        versions = [record.versions.max() for record in loop.last_rollouts()]
        assert min(versions) >= 3
        assert len(asked_too_early) <= loop.recipe.rollouts.max_in_flight
        assert dropped(loop) == 0


async def test_an_engine_that_takes_no_weights_is_complained_about(tmp_path: Path) -> None:
    one, two = StubEngine(), StubEngine()
    async with running(make_run(tmp_path), one, two) as loop:
        await loop.train(1, 1)
        await loop.until(lambda: one.version == "1")
        one.fail_updates = 99
        await loop.publish(2)

        def complaints() -> list[Complaint]:
            return Complaint.read_all(loop.run, loop.attempt)

        await loop.until(complaints)
        (complaint,) = complaints()
        assert (complaint.role, complaint.replica) == ("engine", 0)
        assert "could not load version 2 in 3 attempts" in complaint.message
        # as the supervisor does it
        await one.restart()
        one.fail_updates = 0
        await loop.train(2, 5)
        await loop.until(lambda: one.version == "5")


async def test_an_engine_that_computes_with_wrong_weights_serves_nothing(tmp_path: Path) -> None:
    """It says the right version, and its log-probabilities would be trained on as those of that."""
    one, two = StubEngine(), StubEngine()
    async with running(make_run(tmp_path), one, two) as loop:
        await loop.train(1, 1)
        await loop.until(lambda: loop.parts.pool.version == 1)
        one.wrong_weights = True
        await loop.publish(2)
        await loop.until(lambda: Complaint.read_all(loop.run, loop.attempt))
        (complaint,) = Complaint.read_all(loop.run, loop.attempt)
        assert (complaint.role, complaint.replica, complaint.wrong_weights) == ("engine", 0, True)
        assert "other weights than those of version 2" in complaint.message
        engine = loop.parts.pool.engines[0]
        assert one.version == "2"
        assert engine.version == -1
        asked = len(one.requests)
        await loop.train(2, 4)
        assert len(one.requests) == asked
        assert "engine-0" in kinds(loop, "engine.wrong_weights")
        proved = {event.data["version"] for event in loop.events("engine.weights_updated") if event.data["proved"]}
        assert proved >= {1, 2}
        updates = [event.data for event in loop.events("engine.weights_updated")]
        assert not [update for update in updates if update["engine"] == "engine-0" and update["version"] >= 2]
        # as the supervisor does it
        one.wrong_weights = False
        await one.restart()
        await loop.until(lambda: engine.version >= 4)


async def test_a_share_that_hangs_is_not_an_engine_that_is_lost(tmp_path: Path, monkeypatch: Any) -> None:
    """No engine reads the version in time, and each goes on with the one that it has until the share is back."""
    stub = StubEngine()
    async with running(make_run(tmp_path, handoff={"update_timeout_s": 1.0}), stub) as loop:
        await loop.train(1, 1)
        await loop.until(lambda: loop.parts.pool.version == 1)
        engine = loop.parts.pool.engines[0]
        incarnation = engine.incarnation
        stub.reads.clear()
        await loop.publish(2)
        await loop.until(lambda: len(kinds(loop, "engine.read_timed_out")) > 3, 30.0)
        assert (engine.version, engine.incarnation, engine.away) == (1, incarnation, False)
        stub.reads.set()
        await loop.until(lambda: engine.version == 2)
        assert kinds(loop, "engine.away") == []
        assert Complaint.read_all(loop.run, loop.attempt) == []


async def test_the_run_continues_without_an_engine_that_cannot_read_what_another_can(tmp_path: Path) -> None:
    """It is left behind by one version only, is complained about, and catches up when it was started anew."""
    one, two = StubEngine(), StubEngine()
    async with running(make_run(tmp_path), one, two) as loop:
        await loop.train(1, 2)
        await loop.until(lambda: loop.parts.pool.version == 2)
        one.torn = True
        # more steps than rollouts of version 2 may be used for
        await loop.train(3, 9)
        (complaint,) = Complaint.read_all(loop.run, loop.attempt)
        assert (complaint.role, complaint.replica) == ("engine", 0)
        assert "in 3 attempts: it has version 2, others serve" in complaint.message
        assert complaint.message.endswith("ordered to")
        # it answers all the time, and is asked to load again and again: that is one absence
        assert kinds(loop, "engine.away") == ["engine-0"]
        assert kinds(loop, "engine.back") == []
        assert one.version == "2"
        one.requests.clear()
        await loop.train(10, 11)
        assert not one.requests
        one.torn = False
        await one.restart()
        await loop.until(lambda: one.version == "11")
        await loop.train(12, 14)
        assert (kinds(loop, "engine.away"), kinds(loop, "engine.back")) == (["engine-0"], ["engine-0"])
        # what an attempt under way had asked for, or newer; never what it was left with
        assert {int(request["served"]) for request in one.requests} <= set(range(9, 15))
        assert dropped(loop) == 0


async def test_an_engine_that_is_only_slower_is_not_an_engine_that_fails(tmp_path: Path) -> None:
    """While it loads a version, another engine has taken newer ones."""
    one, two = StubEngine(), StubEngine()
    async with running(make_run(tmp_path), one, two) as loop:
        await loop.train(1, 1)
        await loop.until(lambda: loop.parts.pool.version == 1)
        one.reads.clear()
        await loop.publish(2)
        await loop.until(lambda: two.version == "2")
        for version in (3, 4):
            await loop.publish(version)
            await loop.until(lambda wanted=str(version): two.version == wanted)
        one.reads.set()
        await loop.until(lambda: one.version == "4")
        assert [event.data["version"] for event in loop.events("engine.weights_updated")].count(2) == 2
        assert kinds(loop, "engine.away") == []
        assert Complaint.read_all(loop.run, loop.attempt) == []


async def test_without_any_engine_the_run_ends(tmp_path: Path, monkeypatch: Any) -> None:
    # longer than a busy machine may keep all of this waiting
    monkeypatch.setattr(orchestrator_parts, "engines_lost_after_s", lambda run: 2.0)
    one, two = StubEngine(), StubEngine()
    async with running(make_run(tmp_path), one, two) as loop:
        await loop.train(1, 1)
        await one.stop()
        await asyncio.sleep(3.0)
        assert loop.work is not None
        assert not loop.work.done()
        await two.stop()
        with pytest.raises(PeerLostError, match=r"engine-1 \(.*\) has not answered for 2 s"):
            await asyncio.wait_for(loop.work, 120.0)


async def test_an_engine_comes_back_during_an_exact_evaluation(tmp_path: Path) -> None:
    """The evaluation holds updates, and the only engine must still get the version that is evaluated."""
    stub = StubEngine()
    stub.token_s = 0.05
    async with running(make_run(tmp_path, trainer={"steps": 2}), stub) as loop:
        await loop.train(1, 2)
        finish = asyncio.create_task(loop.ask("finish", 2))
        await loop.until(lambda: loop.parts.evaluator.busy and stub.in_flight > 0)
        await stub.restart()
        await asyncio.wait_for(finish, 120.0)
        (evaluation,) = [event for event in loop.events("evaluation") if event.data["version"] == 2]
        assert (evaluation.data["last_version"], evaluation.data["failed"]) == (2, 0)


async def test_who_waits_for_an_engine_leaves_the_event_loop_to_others() -> None:
    """Between a failed request and the look that tells whether its engine lives."""
    async with aiohttp.ClientSession() as http:
        client = EngineClient(http, name="engine-0", url="http://127.0.0.1:9")
        pool = engine_pool.EnginePool([client], counters=Counters(), request_timeout_s=1.0, max_retries=0)
        pool.engines[0].serve(0, proved_s=0.0)
        await pool.notify()
        session = pool.session("group-0")
        assert await pool.settle(session) is pool.engines[0]
        pool._suspect(pool.engines[0])
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pool.settle(session), 0.1)


@pytest.mark.parametrize("ticks", range(4))
async def test_a_watch_ends_on_request_during_a_check(ticks: int) -> None:
    """`asyncio.wait_for` of Python 3.11 forgets a cancellation that meets the end of what it waits for."""
    async with aiohttp.ClientSession() as http:
        client = EngineClient(http, name="engine-0", url="http://127.0.0.1:9")
        pool = engine_pool.EnginePool([client], counters=Counters(), request_timeout_s=1.0, max_retries=0)
        watch = asyncio.create_task(pool.watch())
        await asyncio.sleep(0.2)
        pool._look.set()
        for _ in range(ticks):
            await asyncio.sleep(0)
        watch.cancel()
        assert (await asyncio.wait([watch], timeout=60.0))[0]


async def test_an_engine_that_loads_slowly_is_not_reported_as_left_behind(tmp_path: Path) -> None:
    """The others have gone on to newer versions, while it loads the one that it was asked to."""
    one, two = StubEngine(), StubEngine()
    async with running(make_run(tmp_path), one, two) as loop:
        await loop.train(1, 2)
        await loop.until(lambda: loop.parts.pool.version == 2)
        two.reads.clear()
        for version in (3, 4):
            await loop.publish(version)
            await loop.until(lambda version=version: one.version == str(version))
        assert two.version == "2"
        two.reads.set()
        await loop.until(lambda: loop.parts.pool.version == 4)
        assert loop.events("engine.away") == []
