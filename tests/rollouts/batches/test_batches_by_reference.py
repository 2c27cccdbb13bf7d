"""Batches by reference: ranks find columns in the node's memory, and in the durable files where there is none."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from free_ports import free_blocks
from harness import make_run, running
from patience import patience
from stub_engine import StubEngine

from hpcrl.dock.ledger.payload import PayloadWriter
from hpcrl.dock.warehouse.embedded import EmbeddedWarehouse
from hpcrl.dock.warehouse.interface import Location
from hpcrl.dock.warehouse.mooncake_payloads import MooncakeWarehouse, leave_pools
from hpcrl.dock.warehouse.reading import BlockReader
from hpcrl.network.credentials import Credentials, ensure_token
from hpcrl.rollouts.batches import warehouse as module
from hpcrl.rollouts.batches.warehouse import WarehouseProcess
from hpcrl.rollouts.core.records import Rollout, Turn
from hpcrl.rollouts.core.saved_turns import SavedTurn
from hpcrl.rollouts.ledger.ledger import RolloutLedger
from hpcrl.runs.role import Endpoints, RoleContext
from hpcrl.runs.rundir import RunDir


def stores(directory: Path | None, limit_gib: float = 1.0) -> dict[str, Any]:
    kept = None if directory is None else str(directory)
    return {"max_off_policy_steps": 1, "warehouse": {"directory": kept, "limit_gib": limit_gib}}


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    (tmp_path / "memory").mkdir()
    return tmp_path / "memory"


async def test_rollouts_of_trained_steps_leave_memory_and_the_rest_at_the_end(tmp_path: Path, memory: Path) -> None:
    run = make_run(tmp_path, rollouts=stores(memory))
    async with running(run, StubEngine()) as loop:
        await loop.train(1, 8)
        assert set(loop.client.sources) == {"node"}
        size, steps = loop.recipe.rollouts.rollouts_per_step, 8
        assert loop.client.sources["node"] == size * steps
        warehouse = loop.parts.restored.ledger.warehouse
        assert warehouse is not None
        await loop.ask("trained", 8)
        # what waits, or is read, of the steps that the bound of staleness allows
        assert warehouse.figures().blocks <= 3 * size
        assert 0 < warehouse.figures().held_bytes < 4096 * size * 5
        size = loop.recipe.rollouts.group_size
        for running_group in loop.parts.scheduler._running.values():
            assert len(running_group.conversations) + len(running_group.rollouts) <= size
    assert list(memory.iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mooncake") is None, reason="mooncake is not installed: hpcrl[store-cpu]")
async def test_ranks_train_from_a_pool_and_from_disk_while_it_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pooled = {"max_off_policy_steps": 1, "warehouse": {"backend": "mooncake", "limit_gib": 0.03}}
    async with running(make_run(tmp_path, rollouts=pooled), StubEngine()) as loop:
        await loop.train(1, 3)
        size, sources = loop.recipe.rollouts.rollouts_per_step, loop.client.sources
        assert sources == {"pool": 3 * size}
        warehouse = loop.parts.restored.ledger.warehouse
        assert isinstance(warehouse, MooncakeWarehouse)
        assert warehouse.figures().blocks <= 3 * size
        first = warehouse.master.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await loop.train(4, 6)
        assert sources["disk"] > 0
        assert sum(sources.values()) == 6 * size
        assert "are read from the shared filesystem" in caplog.text
        await loop.until(lambda: warehouse.master.pid not in (first, None))
        step, known = 6, sources["pool"]
        while sources["pool"] == known:
            step += 1
            assert step < 100
            await loop.train(step, step)
            await asyncio.sleep(0.2)
        leave_pools()
    assert warehouse.master.pid is None


async def test_what_is_dropped_leaves_memory(tmp_path: Path, memory: Path) -> None:
    warehouse = EmbeddedWarehouse(memory, limit_bytes=1 << 20)
    ledger = RolloutLedger(
        tmp_path / "rollouts",
        attempt=1,
        restored=0,
        bound=1,
        limit_s=5.0,
        checkpoints=list,
        warehouse=warehouse,
    )
    task: Any = SimpleNamespace(index=0, environment=SimpleNamespace(name="words"), prompt_index=0)
    ones = np.ones(5, np.int32)
    for member in range(3):
        rollout = Rollout(
            member=member,
            token_ids=ones,
            sampled=ones.astype(np.uint8),
            logprobs=ones.astype(np.float32),
            versions=ones,
            reward=1.0,
            parts={},
            seconds=1.0,
        )
        await ledger.finished(task, rollout)
    saved = SavedTurn(
        said=ones,
        token_ids=ones,
        logprobs=ones.astype(np.float32),
        versions=ones,
        finish_reason="stop",
        salt=1,
        turn=Turn(5, 5, 0.0, 1.0),
    )
    ledger.turn(task, 3, 0, saved)
    async with asyncio.timeout(20.0 * patience()):
        # a rollout is told as finished before its columns are in memory
        while warehouse.figures().blocks < 3:
            await asyncio.sleep(0.01)
    ledger.dropped(0, [0, 2], "too old")
    async with asyncio.timeout(20.0 * patience()):
        while warehouse.figures().blocks > 1:
            await asyncio.sleep(0.01)
    ledger.close()
    # with the last entry written, the turn has had its time: it took no room
    assert warehouse.figures().blocks == 1
    warehouse.close()


async def test_without_a_warehouse_ranks_read_files_that_no_checkpoint_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file holds one rollout here, so that what nobody protects goes at once."""
    monkeypatch.setattr("hpcrl.dock.ledger.payload._FILE_BYTES", 1)
    monkeypatch.setattr(PayloadWriter.__init__, "__kwdefaults__", {"file_bytes": 1})
    run = make_run(tmp_path, rollouts=stores(None))
    async with running(run, StubEngine()) as loop:
        told: list[tuple[int, int, str]] = []
        loop.client.on_disk = lambda step, rollouts, why: told.append((step, rollouts, why))
        await loop.train(1, 8)
        assert set(loop.client.sources) == {"disk"}
        assert {why for *_, why in told} == {""}  # as the recipe wants it
        assert sum(rollouts for _, rollouts, _ in told) == loop.client.sources["disk"]
        assert [step for step, *_ in told] == list(range(1, len(told) + 1))


async def test_where_memory_is_full_whole_batches_wait_alone_and_the_run_continues(
    tmp_path: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Room for four rollouts of sixteen a step."""
    run = make_run(
        tmp_path, rollouts={**stores(memory, 4 * 4096 / (1 << 30)), "max_off_policy_steps": 6, "ready_batches": 4}
    )
    async with running(run, StubEngine()) as loop:
        await loop.train(1, 1)
        scheduler = loop.parts.scheduler
        await loop.until(lambda: scheduler.account.batch_ready and scheduler.in_flight == 0)
        waiting = scheduler.account.waiting
        await asyncio.sleep(0.3)
        assert scheduler.account.waiting == waiting < 3 * loop.recipe.rollouts.rollouts_per_step // 4
        await loop.train(2, 5)
        assert loop.client.sources["disk"] > 0
        assert "the warehouse of rollouts is full" in caplog.text
        assert "hint: a larger rollouts.warehouse.limit_gib" in caplog.text


async def test_a_killed_server_is_started_again_and_serves_the_same_files(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "is_loopback", lambda host: False)
    monkeypatch.setattr(module, "_AGAIN_S", 0.0)
    ensure_token(tmp_path)
    (tmp_path / "payload").mkdir()
    warehouse = EmbeddedWarehouse(memory, limit_bytes=1 << 20)
    block: list[bytes | memoryview] = [b"columns" * 1000]
    place = PayloadWriter(tmp_path / "payload", 1).write([block])[0]
    assert warehouse.put(place, block)
    context = RoleContext(RunDir(tmp_path), attempt=2, role="orchestrator", replica=0, rank=0)
    context.run.attempt_dir(2).mkdir(parents=True)
    (port,) = free_blocks([2])
    Endpoints(urls={"orchestrator": [f"http://127.0.0.1:{port}"]}, servers={}).write(context.run, 2)
    server = WarehouseProcess(context, warehouse, spawn=asyncio.create_task)

    async def read() -> dict[str, int]:
        async with asyncio.timeout(20.0 * patience()):
            while (location := server.locate()) is None or location.port == 0:
                await asyncio.sleep(0.01)
        assert location.port == port + 1
        own = Credentials.of_run(tmp_path, 2).headers["Authorization"]
        elsewhere = Location("/nowhere", location.host, location.port)
        reader = BlockReader(elsewhere, tmp_path / "payload", authorization=own)
        assert await asyncio.to_thread(reader.read, place) == b"".join(block)
        reader.close()
        return dict(reader.sources)

    assert await read() == {"server": 1}
    first = server.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    async with asyncio.timeout(20.0 * patience()):
        while server.pid in (first, None):
            await asyncio.sleep(0.01)
    assert await read() == {"server": 1}
    server.task.cancel()
    await asyncio.gather(server.task, return_exceptions=True)
    assert server.pid is None
    assert server.locate() == Location(str(warehouse.directory), "127.0.0.1", 0)
    warehouse.close()
