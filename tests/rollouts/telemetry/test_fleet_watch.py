"""What the orchestrator sees of engines: load, silence, versions; and what it tells to status and to the pool."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import Loop, impatient, make_run, running
from stub_engine import StubEngine

from hpcrl.rollouts.telemetry import deadlines, fleet_watch
from hpcrl.rollouts.telemetry.fleet_watch import EngineReading
from hpcrl.rollouts.weights import loading as weight_loading
from hpcrl.runs.fleet import EngineView, FleetView


@pytest.fixture(autouse=True)
def quick(monkeypatch: Any) -> Iterator[None]:
    """Looks in tenths of a second."""
    monkeypatch.setattr(fleet_watch, "LOOK_S", 0.05)
    monkeypatch.setattr(deadlines, "SUSPECT_S", 1.5)
    impatient(monkeypatch, lost_after_s=20.0)
    return


def view(loop: Loop) -> FleetView:
    found = FleetView.read(loop.run, loop.attempt)
    return FleetView(time_s=0.0, newest=None, in_flight=0, limit=0) if found is None else found


def engine(loop: Loop, replica: int) -> EngineView:
    found = view(loop).engine(replica)
    return EngineView(replica=replica, version=-2) if found is None else found


def sessions(stub: StubEngine) -> list[str]:
    return [request["session"] for request in stub.requests]


async def test_load_and_versions_are_reported(tmp_path: Path) -> None:
    one, two = StubEngine(), StubEngine()
    one.request_s = two.request_s = 0.5
    async with running(make_run(tmp_path), one, two) as loop:
        busy: list[EngineView] = []

        def seen_busy() -> bool:
            busy.append(engine(loop, 0))
            return bool(busy[-1].running and busy[-1].in_flight)

        await loop.until(seen_busy)
        assert busy[-1].answers
        assert not busy[-1].stuck
        assert (busy[-1].waiting, busy[-1].preemptions) == (0, 0)
        assert (busy[-1].routed, busy[-1].window, view(loop).router) == (None, None, None)
        await loop.until(lambda: (engine(loop, 1).tokens_per_s or 0.0) > 0.0)
        await loop.train(1, 2)
        await loop.until(lambda: engine(loop, 0).version == engine(loop, 1).version == 2)
        assert engine(loop, 0).prefix_hit_rate == 0.25
        assert (view(loop).newest, view(loop).limit) == (2, 32)


async def test_an_engine_that_takes_requests_and_samples_nothing_gets_no_more(tmp_path: Path) -> None:
    one, two = StubEngine(), StubEngine()
    one.request_s = two.request_s = 0.05
    async with running(make_run(tmp_path), one, two) as loop:
        await loop.train(1, 2)
        one.hung = True
        batch = asyncio.create_task(loop.train(3, 4))
        await loop.until(lambda: engine(loop, 0).stuck)
        assert engine(loop, 0).answers, "it answers /health all the time"
        assert engine(loop, 0).quiet_s >= 0.5
        assert not engine(loop, 1).stuck
        assert 'hpcrl_rollouts_engine_stuck{engine="engine-0"} 1' in loop.orchestrator.metrics()
        held = one.in_flight
        assert held
        one.requests.clear()
        await batch
        assert not one.requests
        # the supervisor ends such an engine; its requests go elsewhere
        await one.restart()
        one.hung = False
        await loop.train(5, 8)
        await loop.until(lambda: not engine(loop, 0).stuck and engine(loop, 0).version >= 4)
        counters = loop.parts.counters
        assert counters.dropped_engine + counters.dropped_environment + counters.dropped_group == 0
        assert counters.engine_retries >= held


async def test_a_silent_engine_without_requests_is_asked_for_a_token(tmp_path: Path) -> None:
    """Its rollouts became too old and were aborted: nobody else would ever find out how it is."""
    one, two = StubEngine(), StubEngine()
    one.request_s = two.request_s = 0.05
    async with running(make_run(tmp_path), one, two) as loop:
        await loop.train(1, 2)
        one.hung = True
        batches = asyncio.create_task(loop.train(3, 7))
        await loop.until(lambda: engine(loop, 0).stuck)
        await batches
        before = len(sessions(one))
        await loop.until(lambda: sessions(one).count("probe") == 1 and one.in_flight == 1)
        await asyncio.sleep(0.5)
        assert sessions(one).count("probe") == 1
        one.hung = False
        await loop.until(lambda: not engine(loop, 0).stuck)
        await loop.train(8, 11)
        await loop.until(lambda: len(sessions(one)) > before + 1)


async def test_an_engine_without_requests_or_in_an_exchange_of_weights_is_not_silent(tmp_path: Path) -> None:
    stub = StubEngine()
    async with running(make_run(tmp_path), stub) as loop:
        await loop.train(1, 1)
        await loop.until(lambda: stub.in_flight == 0)
        await asyncio.sleep(2.0)
        assert engine(loop, 0).quiet_s < 2.0
        assert not engine(loop, 0).stuck
        # an exchange takes longer than silence may: nothing is sampled meanwhile
        stub.request_s = 0.3
        await loop.batch(2)
        stub.exchange_s = 2.5
        publishing = asyncio.create_task(loop.publish(2))
        await loop.until(lambda: engine(loop, 0).updating)
        await loop.until(lambda: stub.version == "2")
        assert not engine(loop, 0).stuck
        await publishing
        await loop.until(lambda: not engine(loop, 0).updating)


async def test_an_exchange_that_takes_far_longer_than_any_before_is_not_an_excuse(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(weight_loading, "_USUAL_FLOOR_S", 0.5)
    stub = StubEngine()
    async with running(make_run(tmp_path), stub) as loop:
        stub.request_s = 0.2
        await loop.train(1, 2)
        await loop.until(lambda: engine(loop, 0).version == 2)
        stub.exchange_s = 3600.0
        stub.request_s = 1.0
        await loop.batch(3)
        await loop.until(lambda: stub.in_flight)
        await loop.publish(3)
        await loop.until(lambda: engine(loop, 0).stuck, 30.0)
        assert stub.version == "2"
        assert not engine(loop, 0).updating
        assert not stub.unpaused.is_set()


async def test_an_engine_that_is_gone_is_reported_with_the_reason(tmp_path: Path) -> None:
    one, two = StubEngine(), StubEngine()
    async with running(make_run(tmp_path), one, two) as loop:
        await loop.train(1, 1)
        await two.stop()
        await loop.until(lambda: not engine(loop, 1).answers and engine(loop, 1).why)
        found = engine(loop, 1)
        assert (found.version, found.running, found.kv_usage) == (-1, None, None)
        assert found.why.startswith("engine-1: ")
        await two.restart()
        await loop.until(lambda: engine(loop, 1).version == 1)
        assert engine(loop, 1).why == ""


def test_a_text_that_is_not_an_engines_says_nothing() -> None:
    assert EngineReading.of("vllm:num_requests_running 1\n", 0.0) is None
    assert EngineReading.of("vllm:num_requests_running 1\nvllm:kv_cache_usage_perc none\n", 0.0) is None
    for number in ("NaN", "+Inf", "-Inf", "1e400", "-3", "9" * 5000):
        text = f"vllm:num_requests_running {number}\nvllm:kv_cache_usage_perc 0.5\n"
        assert EngineReading.of(text, 0.0) is None, number
    ranks = "".join(
        f'vllm:{name}{{engine="{rank}"}} {value}\n'
        for rank, (running_now, kv) in enumerate([(3, 0.25), (5, 0.75)])
        for name, value in (("num_requests_running", running_now), ("kv_cache_usage_perc", kv))
    )
    reading = EngineReading.of(ranks, 0.0)
    assert reading is not None
    assert (reading.pressure.running, reading.pressure.kv_usage, reading.hit_rate) == (8, 0.75, None)
