"""The orchestrator over real HTTP, against stub engines: what fails, and what that ends."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import Loop, make_run, running
from patience import hold_reader, patience
from shards import rollouts_of
from stub_engine import StubEngine

from hpcrl.dock.client import DockClient
from hpcrl.errors import FencedError, HpcrlError, PeerLostError
from hpcrl.network.credentials import Credentials
from hpcrl.rollouts import parts as orchestrator_parts
from hpcrl.rollouts.engines import pool as engine_pool
from hpcrl.rollouts.weights import updates as weight_updates
from hpcrl.runs.role import restore_path


async def test_failed_requests_go_elsewhere(tmp_path: Path) -> None:
    stubs = [StubEngine(), StubEngine()]
    stubs[0].fail = 3
    async with running(make_run(tmp_path), *stubs) as loop:
        (shard, *_) = await loop.train(1, 2)
        assert shard.stats.rollouts["dropped_engine"] == 0
        await loop.until(lambda: loop.parts.counters.engine_retries == 3)


async def test_requests_time_out_and_rollouts_are_dropped_with_a_count(tmp_path: Path) -> None:
    stub = StubEngine()
    stub.request_s = lambda number: 60.0 if number <= 6 else 0.0
    rollouts = {"request_timeout_s": 0.2, "max_retries": 0}
    async with running(make_run(tmp_path, rollouts=rollouts), stub) as loop:
        shard = await loop.batch(1)
        counters = loop.parts.counters
        await loop.until(lambda: counters.dropped_engine == 6)
        # four of the first group, two of the second: that one goes on with two members
        assert counters.dropped_group == 0
        assert shard.stats.total_sampled_tokens > 0


async def test_a_group_with_one_member_left_is_replaced(tmp_path: Path) -> None:
    stub = StubEngine()
    stub.fail = 3
    async with running(make_run(tmp_path, rollouts={"max_retries": 0}), stub) as loop:
        shard = await loop.batch(1)
        counters = loop.parts.counters
        assert (counters.dropped_engine, counters.dropped_group) == (3, 1)
        assert len(rollouts_of(shard)) == 16


async def test_what_a_failed_rollout_had_goes_at_once(tmp_path: Path) -> None:
    """Not with the last member of its group: others already have its place in memory. Nor is the group as old as it."""
    stub = StubEngine()
    stub.fail, stub.request_s = 2, 1.0
    async with running(make_run(tmp_path, rollouts={"max_retries": 0}), stub) as loop:
        await loop.until(lambda: loop.parts.counters.dropped_engine == 2)
        groups = loop.parts.scheduler._running.values()
        assert sum(len(group.members) for group in groups) == loop.parts.scheduler.in_flight > 0
        for group in groups:
            assert len(group.conversations) <= len(group.members)
            assert len(group.keepers) <= len(group.members)


async def test_an_engine_that_goes_away_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(engine_pool, "WATCH_S", 0.1)
    monkeypatch.setattr(orchestrator_parts, "engines_lost_after_s", lambda run: 0.3)
    stub = StubEngine()
    async with running(make_run(tmp_path), stub) as loop:
        await loop.batch(1)
        await stub.stop()
        assert loop.work is not None
        with pytest.raises(PeerLostError, match=r"engine-0 \(.*\) has not answered"):
            await asyncio.wait_for(loop.work, 120.0)


async def test_rollouts_that_all_fail_end_the_run(tmp_path: Path) -> None:
    stub = StubEngine()
    stub.fail = 1 << 30
    async with running(make_run(tmp_path, rollouts={"max_retries": 0}), stub) as loop:
        assert loop.work is not None
        with pytest.raises(HpcrlError, match=r"64 rollouts failed .* ordered to fail"):
            await asyncio.wait_for(loop.work, 120.0)


async def test_the_dock_says_that_it_stops_as_soon_as_a_part_has_failed(tmp_path: Path) -> None:
    """Not an internal error, which would be taken for a second failure: parts that end slowly leave it served."""

    async def end_slowly() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(2.0)

    async with running(make_run(tmp_path), StubEngine()) as loop:
        await loop.batch(1)
        loop.orchestrator._tasks.create_task(end_slowly())
        await asyncio.sleep(0)
        loop.orchestrator._fail(HpcrlError("a part failed"))
        await asyncio.sleep(0.2)
        with pytest.raises(PeerLostError, match="410: the orchestrator is stopping"):
            await asyncio.to_thread(loop.client.finish, 0)
        assert loop.work is not None
        assert not loop.work.done()
        with pytest.raises(HpcrlError, match="a part failed"):
            await asyncio.wait_for(loop.work, 120.0)


async def test_an_update_that_fails_is_tried_again_and_requests_always_go_on(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(weight_updates, "_RETRY_S", 0.01)
    stub = StubEngine()
    async with running(make_run(tmp_path), stub) as loop:
        await loop.batch(1)
        stub.fail_updates = 2
        await loop.publish(1)
        await loop.until(lambda: stub.version == "1")
        stub.fail_updates = 99
        await loop.publish(2)
        assert loop.work is not None
        with pytest.raises(PeerLostError, match=r"engine-0 .* could not load version 2 in 3 attempts"):
            await asyncio.wait_for(loop.work, 120.0)
        assert stub.unpaused.is_set()


async def test_a_trainer_of_an_older_attempt_gets_nothing_and_changes_nothing(tmp_path: Path) -> None:
    """One that nobody could end, and that meets the dock of the next attempt on the port of its own."""
    run = make_run(tmp_path)
    run.start_attempt()
    async with running(run, StubEngine()) as loop:
        await loop.batch(1)
        zombie = DockClient(
            loop.dock_url, credentials=Credentials.of_run(run.path, 1), wait_timeout_s=10.0, connect_timeout_s=5.0
        )
        tries = (
            lambda: zombie.batch(2, rank=0, world_size=1),
            lambda: zombie.published(7),
            lambda: zombie.snapshot(1),
            lambda: zombie.finish(1),
        )
        for ask in tries:
            with pytest.raises(FencedError, match="attempt 2 of the run, the request to attempt 1"):
                await asyncio.to_thread(ask)
        assert loop.orchestrator._finished is None
        assert loop.parts.updater.announced == 0
        stranger = DockClient(loop.dock_url, wait_timeout_s=10.0, connect_timeout_s=5.0)
        with pytest.raises(PeerLostError, match="401"):
            await asyncio.to_thread(stranger.finish, 1)
        await loop.publish(1)
        assert (await loop.batch(2)).step == 2
        reasons = [event.data["reason"] for event in loop.events("access.refused")]
    assert reasons == ["other_attempt"] * 4 + ["no_token"]


async def test_engines_that_never_get_healthy_are_named(tmp_path: Path) -> None:
    run = make_run(tmp_path, orchestrator={"wait_timeout_s": 0.3})
    stub = StubEngine()
    await stub.start()
    await stub.stop()
    loop = Loop(run, [stub])
    with pytest.raises(ExceptionGroup) as caught:
        await loop.orchestrator.run()
    assert "engine-0 (http" in str(caught.value.exceptions[0])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_process_ends_promptly_on_a_signal(tmp_path: Path, number: int) -> None:
    run, stub = make_run(tmp_path, rollouts={"request_timeout_s": 3600.0}), StubEngine()
    await stub.start()
    stub.request_s = 3600.0
    loop = Loop(run, [stub])
    environment = {
        **os.environ,
        "HPCRL_RUN_DIR": str(run.path),
        "HPCRL_ATTEMPT": "1",
        "HPCRL_ROLE": "orchestrator",
        "HPCRL_REPLICA": "0",
    }
    child = await asyncio.create_subprocess_exec(sys.executable, "-m", "hpcrl.rollouts", env=environment)
    # an interpreter that starts, not a loop that runs already
    credentials = Credentials.of_run(run.path, 1)
    client = DockClient(
        loop.client.url, credentials=credentials, wait_timeout_s=60.0, connect_timeout_s=60.0 * patience()
    )
    try:
        loop.store.path_of(0).mkdir(parents=True)
        await asyncio.to_thread(client.published, 0)
        await loop.until(lambda: stub.in_flight > 0)
        child.send_signal(number)
        # the request in flight would take an hour
        assert await asyncio.wait_for(child.wait(), 120.0) == 0
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
        await stub.stop()


@pytest.mark.parametrize("file", ["restore.json", "manifest.json"])
async def test_the_process_ends_while_a_read_hangs(tmp_path: Path, file: str) -> None:
    """A FIFO in place of a file of the share: its read waits for ever, and the signal is not lost with it."""
    run, stub = make_run(tmp_path), StubEngine()
    await stub.start()
    loop = Loop(run, [stub])
    version = loop.store.path_of(0)
    version.mkdir(parents=True)
    fifo = restore_path(run, 1) if file == "restore.json" else version / file
    fifo.unlink(missing_ok=True)
    os.mkfifo(fifo)
    environment = {
        **os.environ,
        "HPCRL_RUN_DIR": str(run.path),
        "HPCRL_ATTEMPT": "1",
        "HPCRL_ROLE": "orchestrator",
        "HPCRL_REPLICA": "0",
    }
    child = await asyncio.create_subprocess_exec(sys.executable, "-m", "hpcrl.rollouts", env=environment)
    client = DockClient(
        loop.client.url,
        credentials=Credentials.of_run(run.path, 1),
        wait_timeout_s=60.0,
        connect_timeout_s=60.0 * patience(),
    )
    try:
        if file == "manifest.json":
            await asyncio.to_thread(client.published, 0)
        held = await asyncio.to_thread(hold_reader, fifo, 60.0)
        child.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(child.wait(), 10.0 * patience()) == 0
        os.close(held)
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
        await stub.stop()
