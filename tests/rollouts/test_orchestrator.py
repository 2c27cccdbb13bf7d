"""The orchestrator over real HTTP, against stub engines."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from handoff_lab import model_directory, publish
from harness import CALCULATOR, WORDS, consumed_dir, make_run, running
from shards import rollouts_of, same
from stub_engine import StubEngine, coin, decode

from hpcrl.dock.wire import BatchShard
from hpcrl.errors import PeerLostError

SYNC = {"max_off_policy_steps": 0}


async def test_steps_in_order_with_bounded_staleness(tmp_path: Path) -> None:
    run = make_run(tmp_path, environments=[WORDS, CALCULATOR])
    async with running(run, StubEngine(), StubEngine()) as loop:
        seen: set[str] = set()
        for shard in await loop.train(1, 6):
            assert len(rollouts_of(shard)) == 16
            seen |= set(shard.stats.reward_by_env)
            assert 0 <= shard.stats.staleness_max <= 2
            for micro in shard.micro_batches:
                sampled = micro.loss_mask.astype(bool)
                assert not sampled[micro.cu_seqlens[:-1]].any()
                assert (micro.versions[sampled] >= 0).all()
                for start, end in pairwise(micro.cu_seqlens):
                    versions, said = micro.versions[start:end], ~sampled[start:end]
                    # the whole prompt is under one salt, and nothing older than it follows
                    assert (versions[said] == versions[0]).all()
                    assert (versions[~said] >= versions[0]).all()
                assert (micro.logprobs[~sampled] == 0).all()
                assert (micro.logprobs[sampled] == (-0.25 - micro.token_ids[sampled] / 1024).astype(np.float32)).all()
        # which of them a single batch holds is decided by who finishes first
        assert seen == {"words", "calculator"}
        assert (consumed_dir(run) / "step-000006.jsonl").read_bytes().count(b"\n") == 16
        assert await asyncio.to_thread(lambda: loop.client._request("GET", "/metrics")[1])


async def test_a_batch_is_handed_out_again_until_the_next_is_asked_for(tmp_path: Path) -> None:
    async with running(make_run(tmp_path, trainer={"ranks": 2}), StubEngine()) as loop:
        with pytest.raises(PeerLostError, match=r"409.*rank 0 of 1 asked; the run has 2 data-parallel ranks"):
            await loop.ask("batch", 1, rank=0, world_size=1)
        assert loop.parts.batch_server.step == 0
        first = await loop.ask("batch", 1, rank=0, world_size=2)
        other = await loop.ask("batch", 1, rank=1, world_size=2)
        again = await loop.ask("batch", 1, rank=0, world_size=2)
        assert same(first, again)
        assert len(rollouts_of(first)) + len(rollouts_of(other)) == 16
        assert len(first.micro_batches) == len(other.micro_batches)
        with pytest.raises(PeerLostError, match=r"409.*rank 2 of 2"):
            await loop.ask("batch", 1, rank=2, world_size=2)
        with pytest.raises(PeerLostError, match=r"409.*the next is that of step 2"):
            await loop.ask("batch", 3, rank=0, world_size=2)
        await loop.publish(1)
        await loop.ask("batch", 2, rank=0, world_size=2)
        with pytest.raises(PeerLostError, match="409"):
            await loop.ask("batch", 1, rank=0, world_size=2)


async def test_rollouts_that_cannot_be_written_for_people_are_trained_all_the_same(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    async with running(run, StubEngine()) as loop:
        await loop.train(1, 1)
        away = run.rollouts_dir.rename(run.path / "away")
        run.rollouts_dir.write_text("in the way")
        assert [batch.step for batch in await loop.train(2, 3)] == [2, 3]
        run.rollouts_dir.unlink()
        away.rename(run.rollouts_dir)
        await loop.until((run.rollouts_dir / "step-000003.jsonl").is_file)
        await loop.until((run.rollouts_dir / "step-000002.jsonl").is_file)


async def test_synchronous_runs_are_equal_whatever_the_delays(tmp_path: Path) -> None:
    async def one(path: Path, seed: int) -> list[BatchShard]:
        stubs = [StubEngine(), StubEngine()]
        for stub in stubs:
            stub.request_s = lambda number: 0.03 * coin(seed, number).random()
        changes = {"rollouts": {**SYNC, "zero_variance": "drop"}, "environments": [WORDS, CALCULATOR]}
        async with running(make_run(path, **changes), *stubs) as loop:
            return await loop.train(1, 4)

    first, second = await one(tmp_path / "a", 1), await one(tmp_path / "b", 2)
    assert all(same(a, b) for a, b in zip(first, second, strict=True))
    for step, shard in enumerate(first, 1):
        assert shard.stats.staleness_histogram == {"0": 16}
        sampled = [m.versions[m.loss_mask.astype(bool)] for m in shard.micro_batches]
        assert set(np.concatenate(sampled).tolist()) == {step - 1}


async def test_a_long_tail_does_not_block_steps(tmp_path: Path) -> None:
    stub = StubEngine()
    stub.request_s = lambda number: 3600.0 if number % 40 == 1 else 0.0
    rollouts = {"max_off_policy_steps": 4, "request_timeout_s": 3600.0}
    async with running(make_run(tmp_path, rollouts=rollouts), stub) as loop:
        async with asyncio.timeout(300.0):
            shards = await loop.train(1, 4)
        assert max(shard.stats.staleness_max for shard in shards) <= 4
        assert stub.in_flight >= 1


async def test_rollouts_that_can_no_longer_be_used_are_aborted(tmp_path: Path) -> None:
    stub = StubEngine()
    # the first eight groups have a member that would take for ever; two of them fit beside six others
    stub.request_s = lambda number: 3600.0 if number in (1, 5) else 0.0
    rollouts = {"max_off_policy_steps": 1, "request_timeout_s": 3600.0}
    async with running(make_run(tmp_path, rollouts=rollouts), stub) as loop:
        shards = await loop.train(1, 4)
        await loop.until(lambda: stub.aborted == 2)
        assert max(shard.stats.staleness_max for shard in shards) <= 1
        assert shards[-1].stats.rollouts["cancelled_stale"] == 2
        assert shards[-1].stats.rollouts["dropped_stale"] == 6
        assert loop.parts.scheduler.account.running >= 0


async def test_an_update_in_flight_gives_rollouts_of_two_versions_that_say_so(tmp_path: Path) -> None:
    stub = StubEngine()
    stub.token_s = 0.02
    async with running(make_run(tmp_path, rollouts={"request_timeout_s": 60.0}), stub) as loop:
        await loop.batch(1)
        await loop.until(lambda: stub.begun > 0)
        stub.hung = True  # what has begun does not end before the update, however long that takes
        await loop.publish(1)
        await loop.until(lambda: stub.version == "1")
        stub.hung, stub.token_s = False, 0.0
        # what is still in flight when the trainer goes on may get too old
        await loop.until(lambda: stub.in_flight == 0)
        shards = [await loop.batch(2), await loop.batch(3)]
        mixed = 0
        for shard in shards:
            for micro in shard.micro_batches:
                for start, end in zip(micro.cu_seqlens[:-1], micro.cu_seqlens[1:], strict=True):
                    versions = micro.versions[start:end][micro.loss_mask[start:end].astype(bool)]
                    assert (np.diff(versions) >= 0).all()
                    mixed += versions[0] != versions[-1]
        assert mixed > 0
        assert shards[-1].stats.rollouts["mixed_versions"] >= mixed
        files = [loop.run.rollouts_dir / f"step-{step:06d}.jsonl" for step in (2, 3)]
        await loop.until(lambda: all(file.is_file() for file in files))  # a batch does not wait for its file for long
        lines = [line for file in files for line in file.read_text().splitlines()]
        assert any((line := json.loads(text))["first_version"] != line["last_version"] for text in lines)
        (event,) = [event for event in loop.events("engine.weights_updated") if event.data["version"] == 1]
        assert event.data["engine"] == "engine-0"
        assert 0 <= event.data["pause_s"] <= event.data["seconds"]
        order = [call for call in stub.calls if call != "init_weight_transfer_engine"]
        update = ["start_weight_update", "update_weights", "pause", "finish_weight_update", "resume"]
        assert order == update * (len(order) // 5)
        assert stub.calls.count("init_weight_transfer_engine") == 1


async def test_requests_are_frozen_for_the_exchange_alone(tmp_path: Path) -> None:
    """An engine that loads in place, as vLLM: it reads while it generates, and says when it has read."""
    stub = StubEngine()
    stub.in_place, stub.update_s = True, 0.5
    async with running(make_run(tmp_path), stub) as loop:
        await loop.batch(1)
        await loop.publish(1)
        await loop.until(lambda: stub.version == "1")
        await loop.until(lambda: len(loop.events("engine.weights_updated")) == 2)
        for event in loop.events("engine.weights_updated"):
            # requests are not frozen while it reads
            assert event.data["seconds"] - event.data["pause_s"] >= 0.5
        order = [call for call in stub.calls if call != "init_weight_transfer_engine"]
        once = ["start_weight_update", "update_weights", "pause", "update_weights", "finish_weight_update", "resume"]
        assert order == once * 2


async def test_new_rollouts_are_salted_with_the_version_they_start_with(tmp_path: Path) -> None:
    stub = StubEngine()
    stub.token_s, stub.update_s = 0.005, 0.05
    async with running(make_run(tmp_path, environments=[CALCULATOR]), stub) as loop:
        await loop.train(1, 4)
        opening = [r for r in stub.requests if decode(r["token_ids"]).count("|") == 3]
        assert {r["cache_salt"] for r in opening} >= {"0", "1", "2"}
        # no rollout starts while weights change, so the salt is what the engine served when it arrived
        assert all(r["cache_salt"] == r["served"] for r in opening)
        later = [r for r in stub.requests if decode(r["token_ids"]).count("|") > 3]
        assert any(int(r["cache_salt"]) < int(r["served"]) for r in later)


async def test_members_of_a_group_stay_on_one_engine(tmp_path: Path) -> None:
    stubs = [StubEngine(), StubEngine()]
    async with running(make_run(tmp_path, environments=[CALCULATOR]), *stubs) as loop:
        await loop.train(1, 3)
    sessions = [{r["session"] for r in stub.requests} for stub in stubs]
    assert sessions[0]
    assert sessions[1]
    assert not sessions[0] & sessions[1]


async def test_the_newest_version_wins_and_old_ones_are_collected(tmp_path: Path) -> None:
    stub = StubEngine()
    async with running(make_run(tmp_path, handoff={"keep_last": 1}), stub) as loop:
        await loop.batch(1)
        stub.reads.clear()
        for version in (1, 2, 3):
            await loop.publish(version)
            await loop.until(lambda: stub.calls.count("update_weights") == 2)
        stub.reads.set()
        await loop.until(lambda: stub.version == "3")
        assert stub.calls.count("update_weights") == 3  # versions 0, 1, 3
        await loop.until(lambda: loop.store.versions() == [3])


async def test_versions_are_found_without_a_notification(tmp_path: Path) -> None:
    stub = StubEngine()
    async with running(make_run(tmp_path), stub) as loop:
        await loop.batch(1)
        loop.store.path_of(90).mkdir()  # a copy that goes on, or was given up: no version
        publish(loop.store, 1, model_directory(tmp_path / "start"))
        await loop.until(lambda: stub.version == "1")
        assert loop.parts.updater.announced == 1


async def test_asking_for_a_batch_says_what_is_published(tmp_path: Path) -> None:
    async with running(make_run(tmp_path), StubEngine(), publish=None) as loop:
        loop.store.path_of(0).mkdir(parents=True)
        assert (await loop.batch(1)).step == 1
