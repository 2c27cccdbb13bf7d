"""Both sides of disaggregated serving behind a real vllm-router, with stub engines: no prompt of old weights."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from harness import Loop, impatient, make_run, running
from patience import patience
from real_router import Router
from stub_engine import StubEngine

from hpcrl.errors import DeadlineError
from hpcrl.inference.vllm.front import front_flags, servers_of
from hpcrl.rollouts.engines import client as engine_client
from hpcrl.rollouts.engines import disaggregated_pool, routed_pool
from hpcrl.rollouts.engines import pool as engine_pool
from hpcrl.rollouts.engines.router_client import RouterClient, Worker
from hpcrl.runs.role import Complaint, Endpoints, read_left_out
from hpcrl.runs.status import ComponentState, ComponentStatus, ProcessId, RunState, RunStatus

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def quick(monkeypatch: Any) -> None:
    """Looks and retries in tenths of a second; on a busy machine engines that are well take longer to show it."""
    impatient(monkeypatch, lost_after_s=60.0)
    monkeypatch.setattr(engine_pool, "_SILENT_S", 0.5 * patience())
    monkeypatch.setattr(routed_pool, "_BEHIND_S", 0.5 * patience())


@contextlib.asynccontextmanager
async def sided(
    path: Path, prefill: StubEngine, decode: StubEngine, *more: StubEngine, side: str = "decode", **changes: Any
) -> AsyncIterator[tuple[Loop, Router]]:
    """A loop of both sides; engines ``more`` are of ``side``."""
    router = Router(path / "router.log")
    engines, roles = (prefill, decode, *more), ["prefill", "decode", *[side] * len(more)]
    for engine in engines:
        engine.in_place = True
        await engine.start()
    of_side = {role: [e.url for e, own in zip(engines, roles, strict=True) if own == role] for role in roles}
    # stubs have no KV to lead: NIXL asks them nothing
    flags = front_flags("nixl", of_side["prefill"], of_side["decode"], bootstrap_offset=None)
    await asyncio.to_thread(router.start, *flags)
    try:
        run = make_run(path, **changes)
        async with running(run, *engines, router=router.url, roles=roles) as loop:
            supervised(loop, 1.0)
            yield loop, router
    finally:
        router.kill()


def supervised(loop: Loop, ready_s: float | None) -> None:
    """What the supervisor says of the router; None: it is being started."""
    state = ComponentState.STARTING if ready_s is None else ComponentState.READY
    component = ComponentStatus(role="router", replica=0, state=state, ready_at_s=ready_s)
    own = ProcessId.of(os.getpid())
    assert own is not None
    RunStatus(
        run_id="r",
        attempt=loop.attempt,
        state=RunState.RUNNING,
        supervisor=own,
        started_at_s=0.0,
        heartbeat_s=0.0,
        components=[component],
    ).write(loop.run)


def kinds(loop: Loop, kind: str) -> list[str]:
    return [event.data.get("engine", "router") for event in loop.events(kind)]


def dropped(loop: Loop) -> int:
    counters = loop.parts.counters
    return counters.dropped_engine + counters.dropped_environment + counters.dropped_group


async def test_prompts_go_to_prefill_and_answers_come_from_decode(tmp_path: Path) -> None:
    prefill, decode = StubEngine(), StubEngine()
    async with sided(tmp_path, prefill, decode) as (loop, _):
        await loop.train(1, 5)
        await loop.until(lambda: loop.parts.pool.version == 5)
        assert dropped(loop) == 0
        updated = {event.data["engine"] for event in loop.events("engine.weights_updated")}
        assert updated == {"prefill-0", "decode-0"}
        text = await loop.orchestrator.run_metrics()
        assert 'hpcrl_part_up{role="prefill",replica="0"}' in text
    assert {request["sampling_params"]["max_tokens"] for request in prefill.requests} == {1}
    assert len(prefill.requests) == len(decode.requests) > 30
    # a prompt is computed by the version of its salt, or a newer one that came while it was on its way
    for request in (*prefill.requests, *decode.requests):
        assert int(request["cache_salt"].partition("-")[0]) <= int(request["served"])


async def test_new_rollouts_wait_until_both_sides_serve_one_version(tmp_path: Path) -> None:
    """Else decode would go on from a prompt that an older version has computed."""
    prefill, decode = StubEngine(), StubEngine()
    async with sided(tmp_path, prefill, decode) as (loop, _):
        await loop.train(1, 2)
        await loop.until(lambda: loop.parts.pool.version == 2)
        prefill.reads.clear()
        decode.requests.clear()
        await loop.publish(3)
        await loop.until(lambda: decode.version == "3")
        assert prefill.version == "2"
        await asyncio.sleep(0.4)
        assert not [request for request in decode.requests if request["cache_salt"] == "3"]
        prefill.reads.set()
        await loop.until(lambda: prefill.version == "3")
        await loop.batch(3)
        await loop.train(4, 5)
        await loop.until(lambda: [request for request in decode.requests if request["cache_salt"] >= "3"])
        assert dropped(loop) == 0


async def test_after_a_prefill_engine_was_started_anew_so_is_the_router(tmp_path: Path) -> None:
    """It comes back with the start model, at the same address: nothing of ours may reach it before it is right."""
    prefill, decode = StubEngine(), StubEngine()
    async with sided(tmp_path, prefill, decode) as (loop, router):
        await loop.train(1, 2)
        decode.request_s = 0.5  # some are on their way
        await asyncio.sleep(0.2)
        await prefill.stop()
        batch = asyncio.create_task(loop.train(3, 9))  # more than may have been rolled out before
        await loop.until(lambda: "prefill-0" in kinds(loop, "engine.away"))
        await loop.until(lambda: decode.in_flight == 0)
        await prefill.restart()
        decode.request_s = 0.0

        def complaints() -> list[Complaint]:
            return list(Complaint.read_all(loop.run, loop.attempt))

        await loop.until(lambda: [c for c in complaints() if c.role == "router"], 20.0)
        assert not batch.done()
        assert not prefill.requests
        # it is away for a while: what answers again may be the same one
        assert router.process is not None
        router.process.send_signal(signal.SIGSTOP)
        await loop.until(lambda: kinds(loop, "router.away"))
        router.process.send_signal(signal.SIGCONT)
        await loop.until(lambda: kinds(loop, "router.back"))
        await asyncio.sleep(0.3)
        assert not batch.done()
        assert not prefill.requests
        router.kill()
        supervised(loop, None)
        await asyncio.to_thread(router.start)
        supervised(loop, 2.0)
        await asyncio.wait_for(batch, 120.0)
        assert len(complaints()) == 1
        assert "initial" not in {request["served"] for request in (*prefill.requests, *decode.requests)}
        assert dropped(loop) == 0


async def test_a_router_that_was_started_anew_between_two_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has seen that it was away."""
    prefill, decode = StubEngine(), StubEngine()
    async with sided(tmp_path, prefill, decode) as (loop, router):
        await loop.train(1, 2)
        await prefill.stop()
        batch = asyncio.create_task(loop.train(3, 9))
        await loop.until(lambda: "prefill-0" in kinds(loop, "engine.away"))
        look = RouterClient.workers

        async def look_later(client: RouterClient, *, timeout_s: float) -> dict[str, Worker]:
            await unseen.wait()
            return await look(client, timeout_s=timeout_s)

        unseen = asyncio.Event()
        unseen.set()
        await prefill.restart()
        await loop.until(lambda: Complaint.read_all(loop.run, loop.attempt), 20.0)
        unseen.clear()
        monkeypatch.setattr(RouterClient, "workers", look_later)
        router.kill()
        await asyncio.to_thread(router.start)
        supervised(loop, 2.0)
        unseen.set()
        await asyncio.wait_for(batch, 120.0)
        assert kinds(loop, "router.away") == []
        assert "initial" not in {request["served"] for request in (*prefill.requests, *decode.requests)}
        assert dropped(loop) == 0


async def test_a_router_that_is_not_started_anew_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disaggregated_pool, "_RESTART_S", 1.0)
    prefill, decode = StubEngine(), StubEngine()

    async def prefill_is_renewed() -> None:
        async with sided(tmp_path, prefill, decode) as (loop, _):
            await loop.train(1, 2)
            await prefill.stop()
            await loop.until(lambda: "prefill-0" in kinds(loop, "engine.away"))
            await prefill.restart()
            await loop.train(3, 9)

    with pytest.raises(DeadlineError, match="router was not started again within 1 s"):
        await prefill_is_renewed()


async def test_a_decode_engine_that_dies_is_waited_for(tmp_path: Path) -> None:
    prefill, decode = StubEngine(), StubEngine()
    async with sided(tmp_path, prefill, decode) as (loop, _):
        await loop.train(1, 2)
        await decode.stop()
        batch = asyncio.create_task(loop.train(3, 9))  # more than may have been rolled out before
        await loop.until(lambda: "decode-0" in kinds(loop, "engine.away"))
        await asyncio.sleep(0.5)
        assert not batch.done()
        await decode.restart()
        await asyncio.wait_for(batch, 120.0)
        assert "initial" not in {request["served"] for request in decode.requests}
        assert dropped(loop) == 0


def complaints(loop: Loop) -> list[str]:
    """Return what was said of the router; the newest replaces others."""
    return [c.message for c in Complaint.read_all(loop.run, loop.attempt) if c.role == "router"]


async def started_anew(loop: Loop, router: Router, ready_s: float) -> None:
    """Another process of the router, which reads its engines as `hpcrl.inference.vllm.front` does."""
    router.kill()
    supervised(loop, None)
    endpoints, left_out = Endpoints.read(loop.run, loop.attempt), read_left_out(loop.run, loop.attempt)
    prefill, decode = (servers_of(endpoints, role, left_out) for role in ("prefill", "decode"))
    # of flags that are given twice the router takes the engines of both
    del router._command[router._command.index("--vllm-pd-disaggregation") :]
    await asyncio.to_thread(router.start, *front_flags("nixl", prefill, decode, bootstrap_offset=None))
    supervised(loop, ready_s)


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_requests_continue_while_one_of_several_engines_hangs(tmp_path: Path, side: str) -> None:
    prefill, decode, hanging = StubEngine(), StubEngine(), StubEngine()
    name = f"{side}-1"
    async with sided(tmp_path, prefill, decode, hanging, side=side) as (loop, router):

        async def known() -> set[str]:
            return set(await loop.parts.pool._router.workers(timeout_s=10.0))

        await loop.train(1, 2)
        assert hanging.requests
        hanging.awake.clear()
        await loop.train(3, 9)
        assert (kinds(loop, "engine.away"), read_left_out(loop.run, loop.attempt)) == ([name], {name})
        assert hanging.url not in await known()
        # also where the router ends by itself
        await started_anew(loop, router, 2.0)
        assert hanging.url not in await known()
        await loop.train(10, 12)
        assert (complaints(loop), kinds(loop, "engine.back"), hanging.awake.is_set()) == ([], [], False)
        # it comes back as another process, with the start model
        await hanging.restart()
        await loop.until(lambda: complaints(loop), 20.0)
        assert (hanging.version, hanging.requests) == ("12", [])
        assert complaints(loop) == [f"it does not have {name} as they are now"]
        assert read_left_out(loop.run, loop.attempt) == set()
        await started_anew(loop, router, 3.0)
        await loop.train(13, 16)
        assert hanging.requests
        assert len(complaints(loop)) == 1
        asked = (*prefill.requests, *decode.requests, *hanging.requests)
        assert "initial" not in {request["served"] for request in asked}
        for request in asked:
            assert int(request["cache_salt"].partition("-")[0]) <= int(request["served"])
        assert dropped(loop) == 0


async def test_the_last_engine_of_a_side_is_not_left_out(tmp_path: Path) -> None:
    """One that is left out replaces it as soon as it is back."""
    prefill, decode, other = StubEngine(), StubEngine(), StubEngine()
    async with sided(tmp_path, prefill, decode, other) as (loop, router):
        await loop.train(1, 2)
        await other.stop()
        await loop.train(3, 5)
        assert read_left_out(loop.run, loop.attempt) == {"decode-1"}
        await decode.stop()
        batch = asyncio.create_task(loop.train(6, 12))
        await loop.until(lambda: kinds(loop, "engine.away") == ["decode-1", "decode-0"])
        await asyncio.sleep(0.3)
        assert read_left_out(loop.run, loop.attempt) == {"decode-1"}
        await other.restart()
        await loop.until(lambda: complaints(loop), 20.0)
        assert read_left_out(loop.run, loop.attempt) == {"decode-0"}
        await started_anew(loop, router, 2.0)
        await asyncio.wait_for(batch, 120.0)
        assert other.requests
        # it is back soon after the router was started anew, which is not started anew again now
        await decode.restart()
        await loop.until(lambda: decode.version == "12")
        await loop.train(13, 15)
        assert (decode.requests, read_left_out(loop.run, loop.attempt)) == ([], {"decode-0"})
        assert dropped(loop) == 0


async def test_a_prefill_engine_that_waits_for_its_kv_to_be_fetched_takes_weights(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """Its pause is not answered before; it stands nevertheless, and says so."""
    monkeypatch.setattr(engine_client, "_FREEZE_S", 0.1)
    prefill, decode = StubEngine(), StubEngine()
    async with sided(tmp_path, prefill, decode) as (loop, _):
        await loop.train(1, 2)
        prefill.slow_pause = True
        await loop.train(3, 5)
        await loop.until(lambda: loop.parts.pool.version == 5)
        assert prefill.unpaused.is_set()
        assert kinds(loop, "engine.away") == []
        assert dropped(loop) == 0
