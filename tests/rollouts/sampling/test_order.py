"""Runs of one recipe in deterministic order make the same batches, however long anything takes, and after a kill."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Literal

import pytest
from harness import CALCULATOR, WORDS, Loop, make_run, running
from stub_engine import StubEngine, coin, default_answer

from hpcrl.dock.ledger.entries import read_entries
from hpcrl.dock.ledger.replay import Replay
from hpcrl.dock.wire import BatchShard
from hpcrl.runs.rundir import RunDir

STEPS = 5
Contents = list[tuple[list[tuple[int, int]], bytes, bytes, bytes]]


def contents(shard: BatchShard) -> Contents:
    """What is trained on, in order."""
    return [
        (list(micro.rollouts), micro.token_ids.tobytes(), micro.versions.tobytes(), micro.advantages.tobytes())
        for micro in shard.micro_batches
    ]


def jittered(seed: int) -> StubEngine:
    """An engine whose answers depend on its weights, and take their time."""
    engine = StubEngine()
    engine.answer = lambda token_ids, drawn: default_answer(token_ids, coin(drawn, engine.version).getrandbits(60))
    engine.request_s = lambda number: 0.04 * coin(seed, number).random() ** 3
    return engine


def new_run(path: Path, order: Literal["arrival", "deterministic"], bound: int, **rollouts: Any) -> RunDir:
    path.mkdir(parents=True)
    rollouts = {"max_off_policy_steps": bound, "order": order, "zero_variance": "drop", **rollouts}
    return make_run(path, environments=[WORDS, CALCULATOR], rollouts=rollouts)


async def steps_of(loop: Loop, first: int, last: int, seed: int) -> list[Contents]:
    """Train, with pauses of a trainer of its own speed."""
    found = []
    for step in range(first, last + 1):
        found.append(contents(await loop.batch(step)))
        await asyncio.sleep(0.05 * coin("trainer", seed, step).random())
        await loop.publish(step)
    return found


async def batches(path: Path, order: Literal["arrival", "deterministic"], bound: int, seed: int) -> list[Contents]:
    run = new_run(path, order, bound)
    async with running(run, jittered(seed), jittered(seed + 1)) as loop:
        return await steps_of(loop, 1, STEPS, seed)


@pytest.mark.parametrize("bound", [0, 4])
async def test_two_runs_make_the_same_batches(tmp_path: Path, bound: int) -> None:
    one = await batches(tmp_path / "one", "deterministic", bound, seed=1)
    other = await batches(tmp_path / "other", "deterministic", bound, seed=100)
    assert one == other
    ids = [index for step in one for micro in step for index, _ in micro[0]]
    # groups that were dropped are missing, and each step has those that were begun next
    order = [sorted({index for micro in step for index, _ in micro[0]}) for step in one]
    assert sorted(set(ids)) == [index for step in order for index in step]
    assert len(set(ids)) == 4 * STEPS < max(ids) + 1


async def test_they_differ_in_the_order_of_arrival(tmp_path: Path) -> None:
    one = await batches(tmp_path / "one", "arrival", 2, seed=1)
    assert one != await batches(tmp_path / "other", "arrival", 2, seed=100)


@pytest.mark.parametrize("bound", [0, 1])
async def test_a_run_that_was_killed_makes_the_batches_of_one_that_was_not(tmp_path: Path, bound: int) -> None:
    """The steps behind the checkpoint are made again, and those that follow."""
    whole = await batches(tmp_path / "whole", "deterministic", bound, seed=1)
    run = new_run(tmp_path / "killed", "deterministic", bound)
    async with running(run, jittered(7)) as loop:
        made = await steps_of(loop, 1, 2, 7)
        pool = loop.parts.pool
        await loop.until(lambda: pool.version == 2)
        await loop.checkpoint(2)
        made_again = await steps_of(loop, 3, 3, 7)
        # what weights sample that are about to be withdrawn
        scheduler = loop.parts.scheduler
        await loop.until(lambda: scheduler.account.version == 3 and scheduler._policy.used_up)
    run.start_attempt()
    async with running(run, jittered(9), publish=2) as loop:
        made += await steps_of(loop, 3, STEPS, 9)
    assert made == whole
    assert made_again == whole[2:3]
    replay = Replay(read_entries(run.rollouts_dir / "ledger"))
    assert not replay.problems
    assert {held.entry.first_version for held in replay.gone} == {3}


async def test_weights_are_taken_one_after_the_other_when_their_rollouts_have_ended(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run", "deterministic", 1, zero_variance="keep")
    engine = jittered(3)
    async with running(run, engine) as loop:
        await steps_of(loop, 1, 4, 3)
        # the trainer is ahead by what it may be; engines took each version in its turn
        await loop.until(lambda: loop.parts.pool.version == 4)
        requests = [each for each in engine.requests if each["sampling_params"]["temperature"]]
    served = [int(each["served"]) for each in requests]
    assert served == sorted(served), "an engine went on before a rollout of the version before had ended"
    assert [each["cache_salt"] for each in requests] == [str(version) for version in served]
    assert [event.data["version"] for event in loop.events("engine.weights_updated")] == [0, 1, 2, 3, 4]
