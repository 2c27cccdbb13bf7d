"""A run goes on from its ledger: nothing that finished is asked for again, trained twice, or torn from its group."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
from harness import Loop, consumed_dir, make_run, running
from shards import rollouts_of
from stub_engine import StubEngine

from hpcrl.dock.ledger.entries import Finished, read_entries
from hpcrl.dock.ledger.payload import read_payload
from hpcrl.dock.ledger.replay import Replay, State
from hpcrl.rollouts.core.records import SavedGroup, decode_rollout
from hpcrl.rollouts.environments.data_order import DataOrder
from hpcrl.rollouts.ledger.state import OrchestratorState
from hpcrl.rollouts.restore import open_ledger, resume_from_ledger
from hpcrl.runs.rundir import RunDir


def replay_of(run: RunDir) -> Replay:
    return Replay(read_entries(run.rollouts_dir / "ledger"))


def consumed(run: RunDir, step: int) -> set[tuple[int, int]]:
    lines = (consumed_dir(run) / f"step-{step:06d}.jsonl").read_text().splitlines()
    return {(line["group"], line["member"]) for line in map(json.loads, lines)}


def trained(replay: Replay, step: int) -> set[tuple[int, int]]:
    return {held.id for held in replay.rollouts if held.state is State.TRAINED and held.step == step}


async def test_what_finished_after_the_checkpoint_is_used_and_not_asked_for_again(tmp_path: Path) -> None:
    run = make_run(tmp_path, rollouts={"max_off_policy_steps": 3, "ready_batches": 8})
    engine = StubEngine()
    async with running(run, engine) as loop:
        await loop.train(1, 2)
        await loop.checkpoint(2)
        await loop.train(3, 3)
        scheduler = loop.parts.scheduler
        await loop.until(lambda: scheduler.account.capacity <= 0 and scheduler.in_flight == 0)
        # of groups that start with the next version one member in four never ends: they are cut in the middle
        engine.request_s = lambda number: 30.0 if number % 4 == 0 else 0.0
        await loop.train(4, 4)
        await loop.until(lambda: any(len(running.rollouts) > 1 for running in scheduler._running.values()))
    before = replay_of(run)
    assert not before.problems
    finished_before = {held.id for held in before.rollouts}
    undone = trained(before, 3) | trained(before, 4)
    assert len(undone) == 32
    run.start_attempt()
    async with running(run, StubEngine(), publish=2) as loop:
        await loop.until(loop.is_restored)
        parts, state = loop.parts.restored.found.parts, loop.parts.restored.state
        assert undone <= {(g.index, r.member) for g in state.finished for r in g.rollouts}
        assert not {task.index for task in loop.parts.restored.restart} & {group.index for group in state.finished}
        shards = await loop.train(3, 6)
        assert max(shard.stats.staleness_max for shard in shards) <= 3
    after = replay_of(run)
    assert not after.problems
    assert not after.gone, "a bound of three steps allows all that two steps undid"
    assert undone <= {held.id for held in after.rollouts if held.state is not State.WAITING}
    assert parts, "no group was in flight with a finished member"
    for step in range(1, 7):
        assert consumed(run, step) == trained(after, step)
        assert len(trained(after, step)) == 16
    # members that had finished kept their tokens, and the others came to them
    entries = [entry for entry in read_entries(run.rollouts_dir / "ledger") if isinstance(entry, Finished)]
    assert len(entries) == len({(entry.group, entry.member) for entry in entries})
    assert finished_before <= {(entry.group, entry.member) for entry in entries}


async def test_rollouts_of_a_branch_that_was_given_up_start_again_where_the_bound_says_so(tmp_path: Path) -> None:
    run = make_run(tmp_path, rollouts={"max_off_policy_steps": 1})
    async with running(run, StubEngine()) as loop:
        await loop.train(1, 1)
        await loop.checkpoint(1)
        await loop.train(2, 6)
    ahead = {held.id for held in replay_of(run).rollouts if held.entry.first_version > 2}
    assert ahead
    run.start_attempt()
    async with running(run, StubEngine(), publish=1) as loop:
        shards = await loop.train(2, 6)
        assert max(shard.stats.staleness_max for shard in shards) <= 1
    after = replay_of(run)
    assert not after.problems
    assert {held.id for held in after.gone} == ahead
    assert {held.why for held in after.gone} == {"too old after a restore"}


async def test_a_checkpoint_says_which_groups_had_finished_and_has_none_of_them(tmp_path: Path) -> None:
    run = make_run(tmp_path, rollouts={"max_off_policy_steps": 3})
    async with running(run, StubEngine()) as loop:
        await loop.train(1, 1)
        await loop.until(lambda: loop.parts.scheduler.account.batch_ready)
        state = await loop.checkpoint(1)
    assert state.finished == []
    assert len(state.logged) >= 4
    assert len(state.encode()) < 2000
    # without the ledger they start again, as if they had been in flight
    for path in (run.rollouts_dir / "ledger").iterdir():
        path.unlink()
    run.start_attempt()
    async with running(run, StubEngine(), publish=1) as loop:
        await loop.until(loop.is_restored)
        assert {each.index for each in state.logged} <= {task.index for task in loop.parts.restored.restart}
        await loop.train(2, 3)


async def test_a_checkpoint_of_an_earlier_format_brings_its_rollouts_into_the_ledger(tmp_path: Path) -> None:
    run = make_run(tmp_path, rollouts={"max_off_policy_steps": 3})
    async with running(run, StubEngine()) as loop:
        await loop.train(1, 1)
        await loop.until(lambda: loop.parts.scheduler.account.batch_ready)
        state = loop.parts.batch_server.snapshot(1)
    payload = run.rollouts_dir / "payload"
    saved = [
        SavedGroup(
            index=group.index,
            environment=group.environment,
            prompt_index=group.prompt_index,
            rollouts=[decode_rollout(read_payload(payload, rollout.place)) for rollout in group.rollouts],
        )
        for group in state.finished
    ]
    earlier = msgspec.structs.replace(state, format_version=2, finished=[], saved=saved)
    old = OrchestratorState.decode(earlier.encode())
    assert (old.format_version, len(old.saved)) == (2, len(state.finished))
    for path in (run.rollouts_dir / "ledger").iterdir():
        path.unlink()
    run.start_attempt()
    loop = Loop(run, [StubEngine()])
    ledger = open_ledger(loop.context, loop.recipe, old.step)
    went_on = (await resume_from_ledger(ledger, old, DataOrder(loop.recipe, loop.environments)))[0]
    assert [group.index for group in went_on.finished] == [group.index for group in state.finished]
    await asyncio.to_thread(ledger.close)
    had = {(group.index, rollout.member) for group in old.saved for rollout in group.rollouts}
    found = replay_of(run)
    assert had == {held.id for each in found.waiting().values() for held in each}
    assert found.kept == {group.index for group in old.saved}


async def test_columns_that_are_damaged_start_again_alone(tmp_path: Path) -> None:
    run = make_run(tmp_path, rollouts={"max_off_policy_steps": 3})
    async with running(run, StubEngine()) as loop:
        await loop.train(1, 1)
        await loop.until(lambda: loop.parts.scheduler.account.batch_ready)
        await loop.checkpoint(1)
    held = next(iter(replay_of(run).waiting().values()))[1]
    path = run.rollouts_dir / "payload" / held.entry.payload.file
    data = bytearray(path.read_bytes())
    data[held.entry.payload.offset + held.entry.payload.bytes - 1] ^= 1
    path.write_bytes(data)
    unknown = path.with_name("000077-000001.columns")
    unknown.write_bytes(b"of a writer that was killed before its first entry")
    run.start_attempt()
    async with running(run, StubEngine(), publish=1) as loop:
        await loop.until(loop.is_restored)
        assert [r.member for r in loop.parts.restored.found.parts[held.id[0]].rollouts] == [0, 2, 3]
        assert path.exists()
        assert not unknown.exists()
        await loop.train(2, 4)
    after = replay_of(run)
    assert not after.problems
    assert [each.id for each in after.gone] == [held.id]
    assert after.gone[0].why == "its columns cannot be read"


async def test_columns_that_no_checkpoint_needs_are_removed(tmp_path: Path) -> None:
    run = make_run(tmp_path, rollouts={"max_off_policy_steps": 1})
    payload = run.rollouts_dir / "payload"
    async with running(run, StubEngine()) as loop:
        loop.parts.restored.ledger._log._payload._file_bytes = 1
        await loop.train(1, 8)
        early = {path.name for path in payload.iterdir()}
        await loop.checkpoint(8)
        await loop.train(9, 9)
    there = {path.name for path in payload.iterdir()}
    replay = replay_of(run)
    needed = {held.entry.payload.file for held in replay.rollouts if held.state is State.WAITING}
    assert needed <= there
    assert len(early) > len(early & there)
    assert {held.entry.payload.file for held in replay.rollouts} >= early
    # every rollout is in the ledger still
    assert all(consumed(run, step) == trained(replay, step) for step in range(1, 10))


async def test_batches_after_a_restore_have_the_tokens_of_before(tmp_path: Path) -> None:
    run = make_run(tmp_path, rollouts={"max_off_policy_steps": 3})
    async with running(run, StubEngine()) as loop:
        await loop.train(1, 1)
        await loop.checkpoint(1)
        second = rollouts_of((await loop.train(2, 2))[0])
    run.start_attempt()
    async with running(run, StubEngine(), publish=1) as loop:
        again = rollouts_of((await loop.train(2, 2))[0])
    assert sorted(second) == sorted(again)
