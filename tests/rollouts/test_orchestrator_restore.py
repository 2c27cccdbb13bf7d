"""The orchestrator over real HTTP, against stub engines: evaluations, snapshots, what an attempt goes on from."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from harness import CALCULATOR, WORDS, Loop, consumed_dir, make_run, running
from shards import same
from stub_engine import StubEngine, coin

from hpcrl.checkpoints.restore import RestoreDecision
from hpcrl.errors import CheckpointError, DeadlineError, PeerLostError
from hpcrl.rollouts.sampling.evaluation import evaluated_versions
from hpcrl.runs.role import restore_path
from hpcrl.runs.run_progress import read_evaluations

SYNC = {"max_off_policy_steps": 0}


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
        stub.reads.clear()
        for version in (1, 2, 3):
            await loop.publish(version)
            await loop.until(lambda: stub.calls.count("update_weights") == 2)
        stub.reads.set()
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
    rollouts = {"request_timeout_s": 600.0}
    run = make_run(tmp_path, evaluation={"every_steps": 2, "prompts": 2}, rollouts=rollouts)
    async with running(run, stub) as loop:
        await loop.batch(1)
        await loop.until(lambda: len(loop.events("evaluation")) == 1)
        stub.hung = True
        for version in (1, 2, 3, 4):  # 3 and 4 come while 2 is evaluated
            await loop.publish(version)
            await loop.until(lambda wanted=version: loop.parts.updater._served == wanted)
        assert loop.parts.evaluator.busy
        assert len(loop.events("evaluation")) == 1
        stub.hung = False
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
        await loop.until(loop.is_restored)
        restored = [group.index for group in loop.parts.restored.state.finished]
        second = await loop.train(4, 6)
        evaluated = [event.data["version"] for event in loop.events("evaluation")]
    assert all(same(a, b) for a, b in zip([*first, *second], whole, strict=True))
    assert set(restored) <= set(range(12, 20))
    assert evaluated.count(0) == 1


async def test_finished_rollouts_survive_in_asynchronous_runs(tmp_path: Path) -> None:
    run = make_run(tmp_path, rollouts={"max_off_policy_steps": 3})
    async with running(run, StubEngine()) as loop:
        await loop.train(1, 2)
        await loop.until(lambda: loop.parts.scheduler.account.batch_ready)
        await loop.checkpoint(2)
        # asked for ahead of a second snapshot of the same step: the batch counts as not consumed
        taken = [g.index for g in loop.parts.scheduler.pending(2).finished][:4]
        await loop.batch(3)
        await loop.checkpoint(2)
    run.start_attempt()
    async with running(run, StubEngine(), publish=2) as loop:
        await loop.until(loop.is_restored)
        state = loop.parts.restored.state
        finished = [group.index for group in state.finished]
        assert set(taken) <= set(finished)
        assert not set(finished) & set(state.restart)
        assert max([*finished, *state.restart]) < state.next_index
        shards = await loop.train(3, 6)
        assert max(shard.stats.staleness_max for shard in shards) <= 3
        groups: list[int] = []
        for step in range(1, 7):
            lines = (consumed_dir(run) / f"step-{step:06d}.jsonl").read_text().splitlines()
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
    assert (await loop.restore()).state.step == 1
