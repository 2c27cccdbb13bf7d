"""Engines that join and leave the run (layout elastic): told by the endpoints, which the supervisor replaces."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from harness import Loop, make_run, running
from stub_engine import StubEngine

from hpcrl.rollouts.weights import membership


@pytest.fixture(autouse=True)
def quick(monkeypatch: Any) -> None:
    monkeypatch.setattr(membership, "_LOOK_S", 0.05)


def kinds(loop: Loop, kind: str) -> list[str]:
    return [event.data["engine"] for event in loop.events(kind)]


async def test_an_engine_joins_with_the_newest_version(tmp_path: Path) -> None:
    one, two = StubEngine(), StubEngine()
    async with running(make_run(tmp_path), one, elastic=True, later=[two]) as loop:
        await loop.train(1, 3)
        loop.tell_members(one, two)
        await loop.until(lambda: two.version == "3")
        await loop.train(4, 7)
        await loop.until(lambda: two.requests)
        assert kinds(loop, "engine.added") == ["engine-1"]
        assert "initial" not in {request["served"] for request in two.requests}


async def test_one_that_left_gets_nothing_new_and_no_rollout_is_dropped(tmp_path: Path) -> None:
    one, two = StubEngine(), StubEngine()
    one.request_s = two.request_s = 0.05
    async with running(make_run(tmp_path), one, two, elastic=True) as loop:
        await loop.train(1, 2)
        loop.tell_members(one)
        await loop.until(lambda: kinds(loop, "engine.removed") == ["engine-1"])
        await loop.until(lambda: two.in_flight == 0)
        count = len(two.requests)
        await loop.train(3, 6)
        assert len(two.requests) == count
        counters = loop.parts.counters
        assert counters.dropped_engine + counters.dropped_environment == 0


async def test_without_any_engine_rollouts_wait_for_the_next(tmp_path: Path) -> None:
    one, two = StubEngine(), StubEngine()
    async with running(make_run(tmp_path), one, elastic=True, later=[two]) as loop:
        await loop.train(1, 2)
        loop.tell_members(None)
        await loop.until(lambda: kinds(loop, "engine.removed"))
        batch = asyncio.create_task(loop.train(3, 6))
        await asyncio.sleep(0.5)
        assert not batch.done()
        loop.tell_members(None, two)
        await asyncio.wait_for(batch, 120.0)


async def test_a_new_start_at_the_same_address_is_another_engine(tmp_path: Path) -> None:
    stub = StubEngine()
    async with running(make_run(tmp_path), stub, elastic=True) as loop:
        await loop.train(1, 2)
        await loop.until(lambda: stub.version == "2" and "resume" in stub.calls[-1:])
        await stub.restart()
        loop.tell_members(stub, start=2)
        await loop.until(lambda: kinds(loop, "engine.added") == ["engine-0"])
        await loop.train(3, 4)
        assert stub.calls[0] == "init_weight_transfer_engine"
