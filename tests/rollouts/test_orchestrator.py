"""The orchestrator over real HTTP, against stub engines."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import CALCULATOR, WORDS, Loop, make_run, running
from patience import patience
from stub_engine import StubEngine, coin, decode

from hpcrl.checkpoints.restore import RestoreDecision
from hpcrl.credentials import Credentials
from hpcrl.dock.client import DockClient
from hpcrl.dock.wire import BatchShard
from hpcrl.errors import CheckpointError, DeadlineError, FencedError, HpcrlError, PeerLostError
from hpcrl.rollouts import orchestrator
from hpcrl.rollouts.engines import pool as engine_pool
from hpcrl.rollouts.sampling.evaluation import evaluated_versions
from hpcrl.rollouts.weights import updates as weight_updates
from hpcrl.runs.observe import read_evaluations
from hpcrl.runs.role import restore_path

SYNC = {"max_off_policy_steps": 0}


def rollouts_of(shard: BatchShard) -> list[tuple[int, ...]]:
    found = []
    for micro in shard.micro_batches:
        for start, end in zip(micro.cu_seqlens[:-1], micro.cu_seqlens[1:], strict=True):
            found.append(tuple(micro.token_ids[start:end].tolist()))
    return found


def same(a: BatchShard, b: BatchShard) -> bool:
    def arrays(shard: BatchShard) -> list[bytes]:
        return [
            array.tobytes()
            for m in shard.micro_batches
            for array in (m.token_ids, m.cu_seqlens, m.loss_mask, m.logprobs, m.versions, m.advantages)
        ]

    return arrays(a) == arrays(b)


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
        assert (run.rollouts_dir / "step-000006.jsonl").read_bytes().count(b"\n") == 16
        assert await asyncio.to_thread(lambda: loop.client._request("GET", "/metrics")[1])


async def test_a_batch_is_handed_out_again_until_the_next_is_asked_for(tmp_path: Path) -> None:
    async with running(make_run(tmp_path, trainer={"ranks": 2}), StubEngine()) as loop:
        with pytest.raises(PeerLostError, match=r"409.*rank 0 of 1 asked; the run has 2 trainer ranks"):
            await loop.ask("batch", 1, rank=0, world_size=1)
        assert loop.orchestrator._batch_server.step == 0
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
    stub.request_s = lambda number: 20.0 if number % 40 == 1 else 0.0
    async with running(make_run(tmp_path, rollouts={"max_off_policy_steps": 4}), stub) as loop:
        async with asyncio.timeout(5.0):
            shards = await loop.train(1, 4)
        assert max(shard.stats.staleness_max for shard in shards) <= 4
        assert stub.in_flight >= 1


async def test_rollouts_that_can_no_longer_be_used_are_aborted(tmp_path: Path) -> None:
    stub = StubEngine()
    # the first eight groups have a member that would take for ever; two of them fit beside six others
    stub.request_s = lambda number: 60.0 if number in (1, 5) else 0.0
    async with running(make_run(tmp_path, rollouts={"max_off_policy_steps": 1}), stub) as loop:
        shards = await loop.train(1, 4)
        await loop.until(lambda: stub.aborted == 2)
        assert max(shard.stats.staleness_max for shard in shards) <= 1
        assert shards[-1].stats.rollouts["cancelled_stale"] == 2
        assert shards[-1].stats.rollouts["dropped_stale"] == 6
        assert loop.orchestrator._scheduler.account.running >= 0


async def test_an_update_in_flight_gives_rollouts_of_two_versions_that_say_so(tmp_path: Path) -> None:
    stub = StubEngine()
    stub.token_s = 0.02
    async with running(make_run(tmp_path), stub) as loop:
        await loop.batch(1)
        await loop.until(lambda: stub.in_flight > 0)
        stub.token_s = 0.5  # what is in flight does not end before a slow machine has published
        await loop.publish(1)
        await loop.until(lambda: stub.version == "1")
        stub.token_s = 0.0
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
            assert event.data["seconds"] >= 0.5 > event.data["pause_s"]
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


async def test_failed_requests_go_elsewhere(tmp_path: Path) -> None:
    stubs = [StubEngine(), StubEngine()]
    stubs[0].fail = 3
    async with running(make_run(tmp_path), *stubs) as loop:
        (shard, *_) = await loop.train(1, 2)
        assert shard.stats.rollouts["dropped_engine"] == 0
        await loop.until(lambda: loop.orchestrator._counters.engine_retries == 3)


async def test_requests_time_out_and_rollouts_are_dropped_with_a_count(tmp_path: Path) -> None:
    stub = StubEngine()
    stub.request_s = lambda number: 60.0 if number <= 6 else 0.0
    rollouts = {"request_timeout_s": 0.2, "max_retries": 0}
    async with running(make_run(tmp_path, rollouts=rollouts), stub) as loop:
        shard = await loop.batch(1)
        counters = loop.orchestrator._counters
        await loop.until(lambda: counters.dropped_engine == 6)
        # four of the first group, two of the second: that one goes on with two members
        assert counters.dropped_group == 0
        assert shard.stats.total_sampled_tokens > 0


async def test_a_group_with_one_member_left_is_replaced(tmp_path: Path) -> None:
    stub = StubEngine()
    stub.fail = 3
    async with running(make_run(tmp_path, rollouts={"max_retries": 0}), stub) as loop:
        shard = await loop.batch(1)
        counters = loop.orchestrator._counters
        assert (counters.dropped_engine, counters.dropped_group) == (3, 1)
        assert len(rollouts_of(shard)) == 16


async def test_an_engine_that_goes_away_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(engine_pool, "WATCH_S", 0.1)
    monkeypatch.setattr(orchestrator, "engines_lost_after_s", lambda run: 0.3)
    stub = StubEngine()
    async with running(make_run(tmp_path), stub) as loop:
        await loop.batch(1)
        await stub.stop()
        assert loop.work is not None
        with pytest.raises(PeerLostError, match=r"engine-0 \(.*\) has not answered"):
            await asyncio.wait_for(loop.work, 10.0)


async def test_rollouts_that_all_fail_end_the_run(tmp_path: Path) -> None:
    stub = StubEngine()
    stub.fail = 1 << 30
    async with running(make_run(tmp_path, rollouts={"max_retries": 0}), stub) as loop:
        assert loop.work is not None
        with pytest.raises(HpcrlError, match=r"64 rollouts failed .* ordered to fail"):
            await asyncio.wait_for(loop.work, 10.0)


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
            await asyncio.wait_for(loop.work, 5.0)
        assert stub.unpaused.is_set()


async def test_the_newest_version_wins_and_old_ones_are_collected(tmp_path: Path) -> None:
    stub = StubEngine()
    async with running(make_run(tmp_path, handoff={"keep_last": 1}), stub) as loop:
        await loop.batch(1)
        stub.update_s = 0.3
        for version in (1, 2, 3):
            await loop.publish(version)
        await loop.until(lambda: stub.version == "3")
        assert stub.calls.count("update_weights") == 3  # versions 0, 1, 3
        await loop.until(lambda: loop.store.versions() == [3])


async def test_versions_are_found_without_being_told(tmp_path: Path) -> None:
    stub = StubEngine()
    async with running(make_run(tmp_path), stub) as loop:
        await loop.batch(1)
        loop.store.path_of(1).mkdir()
        await loop.until(lambda: stub.version == "1")


async def test_asking_for_a_batch_says_what_is_published(tmp_path: Path) -> None:
    async with running(make_run(tmp_path), StubEngine(), publish=None) as loop:
        loop.store.path_of(0).mkdir(parents=True)
        assert (await loop.batch(1)).step == 1


async def test_evaluations(tmp_path: Path) -> None:
    stub = StubEngine()
    stub.token_s = 0.002
    changes = {"evaluation": {"every_steps": 2, "prompts": 6}, "environments": [WORDS, CALCULATOR]}
    async with running(make_run(tmp_path, **changes), stub) as loop:
        await loop.train(1, 5)
        in_flight = stub.in_flight
        await loop.ask("finish", 5)
        data = [event.data for event in loop.events("evaluation")]
        assert (data[0]["version"], data[0]["last_version"]) == (0, 0)
        assert (data[-1]["version"], data[-1]["last_version"]) == (5, 5)
        assert len(data) >= 3
        assert all(d["prompts"] == 6 and d["failed"] == 0 for d in data)
        assert set(data[0]["by_env"]) == {"words", "calculator"}
        assert {"words/exact", "calculator/tool"} <= set(data[0]["parts"])
        assert in_flight == 0 or stub.aborted > 0
        await loop.ask("finish", 5)
        assert len(loop.events("evaluation")) == len(data)


async def test_a_version_that_engines_skip_is_evaluated_at_the_next(tmp_path: Path) -> None:
    stub = StubEngine()
    run = make_run(tmp_path, evaluation={"every_steps": 2, "prompts": 2})
    async with running(run, stub) as loop:
        await loop.batch(1)
        await loop.until(lambda: len(loop.events("evaluation")) == 1)
        stub.update_s = 0.3
        for version in (1, 2, 3):
            await loop.publish(version)
        await loop.until(lambda: stub.version == "3")
        assert stub.calls.count("update_weights") == 3  # versions 0, 1, 3
        await loop.until(lambda: len(loop.events("evaluation")) == 2)
        await loop.publish(4)
        await loop.until(lambda: len(loop.events("evaluation")) == 3)
        data = [event.data for event in loop.events("evaluation")]
        assert [(d["due"], d["version"]) for d in data] == [(0, 0), (2, 3), (4, 4)]
    # a resume at step 3 has nothing to make up for, one at step 6 has
    past = evaluated_versions(run, up_to=3)
    assert 0 in past.exact
    assert past.due == {0, 2}
    assert {0, 2, 4} == evaluated_versions(run, up_to=6).due
    assert [evaluation.due for evaluation in read_evaluations(run)] == [None, 2, None]


async def test_a_version_that_comes_due_during_an_evaluation_is_not_forgotten(tmp_path: Path) -> None:
    stub = StubEngine()
    run = make_run(tmp_path, evaluation={"every_steps": 2, "prompts": 2})
    async with running(run, stub) as loop:
        await loop.batch(1)
        await loop.until(lambda: len(loop.events("evaluation")) == 1)
        stub.token_s = 1.0
        for version in (1, 2, 3, 4):  # 3 and 4 come while 2 is evaluated
            await loop.publish(version)
            await loop.until(lambda wanted=str(version): stub.version == wanted)
        assert len(loop.events("evaluation")) == 1
        stub.token_s = 0.0
        await loop.until(lambda: len(loop.events("evaluation")) == 2)
        await loop.publish(5)
        await loop.until(lambda: len(loop.events("evaluation")) == 3)
        assert [event.data["due"] for event in loop.events("evaluation")] == [0, 2, 4]


async def test_snapshot_and_restore_lose_and_repeat_nothing(tmp_path: Path) -> None:
    changes = {"rollouts": {**SYNC}, "evaluation": {"every_steps": 2, "prompts": 4}}
    async with running(make_run(tmp_path / "whole", **changes), StubEngine()) as loop:
        whole = await loop.train(1, 6)

    run = make_run(tmp_path / "cut", **changes)
    stub = StubEngine()
    stub.request_s = lambda number: 0.02 * coin(number).random()
    async with running(run, stub) as loop:
        first = await loop.train(1, 3)
        await asyncio.sleep(0.03)  # some groups of step 4 are finished, some in flight
        await loop.checkpoint(3)
        await loop.train(4, 5)  # the abandoned future
    run.start_attempt()
    async with running(run, StubEngine(), publish=3) as loop:
        await loop.until(loop.orchestrator._restored.is_set)
        restored = [group.index for group in loop.orchestrator._state.finished]
        second = await loop.train(4, 6)
        evaluated = [event.data["version"] for event in loop.events("evaluation")]
    assert all(same(a, b) for a, b in zip([*first, *second], whole, strict=True))
    assert set(restored) <= set(range(12, 20))
    assert evaluated.count(0) == 1


async def test_finished_rollouts_survive_in_asynchronous_runs(tmp_path: Path) -> None:
    run = make_run(tmp_path, rollouts={"max_off_policy_steps": 3})
    async with running(run, StubEngine()) as loop:
        await loop.train(1, 2)
        await loop.until(lambda: loop.orchestrator._scheduler.account.batch_ready)
        await loop.checkpoint(2)
        # asked for ahead of a second snapshot of the same step: the batch counts as not consumed
        taken = [g.index for g in loop.orchestrator._scheduler.pending(2).finished][:4]
        await loop.batch(3)
        await loop.checkpoint(2)
    run.start_attempt()
    async with running(run, StubEngine(), publish=2) as loop:
        await loop.until(loop.orchestrator._restored.is_set)
        state = loop.orchestrator._state
        finished = [group.index for group in state.finished]
        assert set(taken) <= set(finished)
        assert not set(finished) & set(state.restart)
        assert max([*finished, *state.restart]) < state.next_index
        shards = await loop.train(3, 6)
        assert max(shard.stats.staleness_max for shard in shards) <= 3
        groups: list[int] = []
        for step in range(1, 7):
            lines = (run.rollouts_dir / f"step-{step:06d}.jsonl").read_text().splitlines()
            groups += {json.loads(line)["group"] for line in lines}
        assert len(groups) == len(set(groups)) == 6 * 4


async def test_trainer_and_orchestrator_must_resume_from_the_same_step(tmp_path: Path) -> None:
    async with running(make_run(tmp_path), StubEngine(), publish=None) as loop:
        message = "began with version 4, the orchestrator restored step 0"
        with pytest.raises((CheckpointError, PeerLostError), match=message):
            await loop.batch(5)
        assert loop.work is not None
        with pytest.raises(CheckpointError, match=message):
            await loop.work


async def test_a_trainer_that_never_says_what_it_restores_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path, orchestrator={"wait_timeout_s": 0.2}, checkpoint={"verify_timeout_s": 0.1})
    loop = Loop(run, [StubEngine()])
    restore_path(run, loop.attempt).unlink()
    with pytest.raises(ExceptionGroup) as caught:
        await loop.orchestrator.run()
    (error,) = caught.value.exceptions
    assert isinstance(error, DeadlineError)
    assert "which checkpoint it restores" in str(error)


async def test_the_orchestrator_restores_what_the_trainer_says(tmp_path: Path) -> None:
    """Not the newest: the trainer may have found that one damaged."""
    run, engine = make_run(tmp_path), StubEngine()
    async with running(run, engine) as loop:
        for step in (1, 2):
            await loop.train(step, step)
            await loop.checkpoint(step)
    run.start_attempt()
    loop = Loop(run, [engine])
    RestoreDecision(step=1, verified="content", seconds=0.0, skipped=[]).write(restore_path(run, loop.attempt))
    await loop.orchestrator._restore()
    assert loop.orchestrator._state.step == 1


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
        assert loop.orchestrator._updater.announced == 0
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
    run, stub = make_run(tmp_path), StubEngine()
    await stub.start()
    stub.request_s = 30.0
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
        started = time.monotonic()
        child.send_signal(number)
        assert await asyncio.wait_for(child.wait(), 20.0) == 0
        # the request in flight would have taken 30 s
        assert time.monotonic() - started < 20.0
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
        await stub.stop()
