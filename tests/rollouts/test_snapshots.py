"""Snapshots at any moment: going on from one trains every group once, and loses none."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness import Loop, make_run, running
from patience import patience
from scheduler_lab import BOUND, GROUPS, SIZE, TWO, Unwritten, living, small_recipe, through_bytes
from stub_engine import StubEngine

from hpcrl.dock.wire import BatchShard
from hpcrl.errors import CheckpointError
from hpcrl.network.credentials import Credentials
from hpcrl.rollouts.batches import server as batch_server
from hpcrl.rollouts.batches.build import Batch
from hpcrl.rollouts.batches.server import ConflictError
from hpcrl.rollouts.core.records import Group
from hpcrl.rollouts.environments import build_environments
from hpcrl.rollouts.environments.data_order import DataOrder
from hpcrl.rollouts.ledger.state import OrchestratorState


def check(state: OrchestratorState, trained: Sequence[int], versions: dict[int, int]) -> None:
    """Every group that was started has one place, or became too old by the steps that the state has consumed."""
    finished = [group.index for group in state.finished]
    placed = [*trained, *finished, *state.restart]
    assert len(placed) == len(set(placed)), (sorted(trained), finished, state.restart)
    lost = set(range(state.next_index)) - set(placed)
    assert all(versions[index] < state.step - BOUND for index in lost), (state.step, lost, versions)
    assert [each.index for each in state.dealt] == state.restart
    assert state.counters.consumed == SIZE * len(trained)


@pytest.mark.parametrize("seed", range(12))
async def test_every_group_is_trained_once_wherever_a_run_continues(tmp_path: Path, seed: int) -> None:
    rng, recipe = random.Random(seed), small_recipe(tmp_path)
    saved, history, old = OrchestratorState.fresh(recipe), list[int](), dict[int, int]()
    moments: set[str] = set()
    while saved.step < 14 or (len(moments) < 5 and saved.step < 400):
        trained = list(history)
        async with living(recipe, through_bytes(saved)) as life:
            versions = life.pool.versions
            versions.update({index: version for index, version in old.items() if index not in saved.restart})
            for step in range(saved.step + 1, saved.step + 1 + rng.randrange(1, 6)):
                moment = rng.choice(("before", "waiting", "building", "fetched", "ahead"))
                began_s = asyncio.get_running_loop().time()
                while True:
                    # the trainer has trained `step - 1`, and one of its ranks asks for the next
                    assert asyncio.get_running_loop().time() - began_s < 120.0, "the batch never came"
                    await life.turn(rng)
                    if rng.random() < 0.2:
                        life.serve(step - 1)
                    now = "before"
                    if step in life.desk._builds:
                        now = "building" if life.desk.step == step else "waiting"
                        now = "fetched" if life.desk._handed_out == step else now
                    if now == moment and rng.random() < 0.7:
                        moment = "done"
                        saved, history, old = life.desk.snapshot(step - 1), list(trained), dict(versions)
                        check(saved, trained, versions)
                        moments.add(now)
                    if now == "building" and rng.random() < 0.5:
                        life.desk.gate.set()
                    if (now != "before" or rng.random() < 0.3) and await life.ask(step):
                        break
                if moment == "ahead":
                    await life.turn(rng)
                    saved, history, old = life.desk.snapshot(step - 1), list(trained), dict(versions)
                    check(saved, trained, versions)
                    moments.add(moment)
                trained += life.indices(step)
                assert len(set(trained)) == len(trained)
                life.desk.gate.clear()
                # while it trains, its rank asks for the next, and may have it before the step is trained
                for _ in range(rng.randrange(12)):
                    await life.turn(rng)
                    if rng.random() < 0.3:
                        life.desk.gate.set()
                    if await life.ask(step + 1, ahead=True):
                        break
                assert len(life.desk._builds) <= 2
    assert moments == {"before", "waiting", "building", "fetched", "ahead"}


async def test_states_that_are_gone_or_to_come_are_refused(tmp_path: Path) -> None:
    recipe, rng = small_recipe(tmp_path), random.Random(0)
    async with living(recipe, OrchestratorState.fresh(recipe)) as life:
        assert life.desk.snapshot(0).next_index == 0
        for step in (1, 2, 3):
            while not await life.ask(step):
                await life.turn(rng)
                life.desk.gate.set()
            life.serve(step)
        assert [life.desk.snapshot(step).step for step in (2, 3)] == [2, 3]
        life.desk.gate.clear()
        while life.desk.step == 3:  # built and not handed out
            await life.ask(4)
            await life.turn(rng)
        for step in (1, 2, 4, 5):
            with pytest.raises(ConflictError, match=f"snapshot of step {step} .* delivered is 3"):
                life.desk.snapshot(step)


async def test_a_batch_is_taken_ahead_only_where_no_group_in_flight_is_lost_by_it(tmp_path: Path) -> None:
    base, rng = small_recipe(tmp_path), random.Random(0)
    recipe = small_recipe(tmp_path, rollouts={**base.rollouts.model_dump(), "max_off_policy_steps": 2})
    async with living(recipe, OrchestratorState.fresh(recipe)) as life:
        life.desk.gate.set()
        life.pool.slow.add(0)
        for step in (1, 2):
            while not await life.ask(step):
                await life.turn(rng)
        life.serve(1)
        # all that may be asked for now is answered, but for the one group
        while life.scheduler.account.waiting < GROUPS or life.pool.waiting or life.scheduler.account.running > 1:
            await life.turn(rng)
        # step 2 trains; by step 3 the group of version 0 that is still in flight would be too old
        for _ in range(20):
            assert not await life.ask(3, ahead=True)
        assert life.desk.step == 2
        assert life.scheduler.pending(2).counters.cancelled_stale == 0  # type: ignore[union-attr]
        # the trainer itself waits: now it is taken, and the old one given up
        life.desk.trained(2)
        while not await life.ask(3, ahead=True):
            await asyncio.sleep(0.001)
        assert 0 not in life.indices(3)
        assert life.scheduler.pending(3).counters.cancelled_stale == SIZE  # type: ignore[union-attr]
        assert life.desk.snapshot(2).restart[0] == 0


async def test_finished_groups_that_a_step_makes_too_old_are_kept_for_a_snapshot_before_it(tmp_path: Path) -> None:
    """As after a resume with a lower bound: more has finished than one step can use, and then nothing may be old."""
    recipe, rng = small_recipe(tmp_path), random.Random(0)
    async with living(recipe, OrchestratorState.fresh(recipe)) as life:
        while len(life.desk.snapshot(0).finished) < 2 * GROUPS:
            await life.turn(rng)
        state, versions = life.desk.snapshot(0), life.pool.versions
    strict = small_recipe(tmp_path, rollouts={**recipe.rollouts.model_dump(), "max_off_policy_steps": 0})
    async with living(strict, through_bytes(state)) as life:
        life.desk.gate.set()
        while not await life.ask(1):
            await life.turn(rng)
        assert life.scheduler.pending(1).counters.dropped_stale == GROUPS * SIZE  # type: ignore[union-attr]
        # the ledger knows by which step, so that a restore before it gives them back
        old = [why for _, why in life.journal.ended if why.startswith("too old")]
        assert old == [f"too old: {list(range(SIZE))}, step 1"] * GROUPS
        before = life.desk.snapshot(0)
        assert {group.index for group in before.finished} >= {group.index for group in state.finished}
        assert before.counters.dropped_stale == 0
        check(before, [], versions)


async def test_where_memory_is_full_a_batch_in_order_still_gets_the_group_that_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a restore a group has to start again, and more than a batch has finished behind it: the batch waits for
    that group, so it must start, or neither would ever go on."""
    ordered = {**small_recipe(tmp_path).rollouts.model_dump(), "order": "deterministic", "max_off_policy_steps": 3}
    recipe, rng = small_recipe(tmp_path, rollouts=ordered), random.Random(0)
    async with living(recipe, OrchestratorState.fresh(recipe)) as life:
        life.pool.slow = {0}
        async with asyncio.timeout(20.0 * patience()):
            while len(life.desk.snapshot(0).finished) < GROUPS:
                await life.turn(rng)
        state = life.desk.snapshot(0)
    assert 0 in state.restart
    monkeypatch.setattr(Unwritten, "full", True)
    async with living(recipe, through_bytes(state)) as life:
        life.desk.gate.set()
        async with asyncio.timeout(20.0 * patience()):
            while not await life.ask(1):
                await life.turn(rng)
        assert life.indices(1) == [0, 1, 2]


async def test_a_resume_with_a_lower_bound_trains_nothing_that_is_older(tmp_path: Path) -> None:
    recipe, rng = small_recipe(tmp_path), random.Random(0)
    async with living(recipe, OrchestratorState.fresh(recipe)) as life:
        life.desk.gate.set()
        # a batch of version 0, and what has finished of it beside that
        while not (await life.ask(1) and len(life.desk.snapshot(1).finished) == GROUPS):
            await life.turn(rng)
        state = life.desk.snapshot(1)
    strict = small_recipe(tmp_path, rollouts={**recipe.rollouts.model_dump(), "max_off_policy_steps": 0})
    async with living(strict, through_bytes(state)) as life:
        life.desk.gate.set()
        while not await life.ask(2):
            await life.turn(rng)
        taken = life.scheduler._taken.find(2)
        assert taken is not None
        assert {group.version for group in taken.groups} == {1}
        assert life.desk.snapshot(2).counters.dropped_stale == GROUPS * SIZE


async def test_groups_start_again_with_what_they_had_when_weights_change(tmp_path: Path) -> None:
    recipe, rng = small_recipe(tmp_path), random.Random(0)
    async with living(recipe, OrchestratorState.fresh(recipe)) as life:
        await life.turn(rng)
        had = {i: running.task for i, running in life.scheduler._running.items()}
        state = OrchestratorState.decode(life.desk.snapshot(0).encode())
    assert {task.environment.name for task in had.values()} == {"a", "b"}
    # another order, other weights, one more
    other = [{"name": "c", "kind": "words", "weight": 99.0}, {**TWO[1], "weight": 5.0}, TWO[0]]
    changed = small_recipe(tmp_path, environments=other)
    order = DataOrder(changed, build_environments(changed))
    assert any(order.task(i).environment.name != task.environment.name for i, task in had.items())
    again = state.groups_to_redispatch(order)
    found = {task.index: (task.environment.name, task.prompt_index) for task in again}
    assert found == {i: (task.environment.name, task.prompt_index) for i, task in had.items() if i in found}
    assert len(found) == len(state.restart) > 0
    gone = small_recipe(tmp_path, environments=TWO[:1])
    with pytest.raises(CheckpointError, match=r"no longer has: 'b' \(\d+ groups\)\n    hint: .*1e-9"):
        state.groups_to_redispatch(DataOrder(gone, build_environments(gone)))


def test_a_state_of_the_first_format_is_dealt_by_its_indices(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path)
    order = DataOrder(recipe, build_environments(recipe))
    first = OrchestratorState(
        step=0,
        seed=recipe.seed,
        group_size=SIZE,
        next_index=3,
        restart=[0, 2],
        finished=[],
        counters=OrchestratorState.fresh(recipe).counters,
        format_version=1,
    )
    assert OrchestratorState.decode(first.encode()).groups_to_redispatch(order) == [order.task(0), order.task(2)]


async def test_a_request_that_is_cut_off_while_the_batch_is_built_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over HTTP: the trainer's connection breaks, it polls through a long build, and saves meanwhile."""
    built: list[int] = []
    begun, gate = threading.Event(), threading.Event()
    build = batch_server.build_batch

    def slow(groups: Sequence[Group], *, step: int, **keywords: Any) -> Batch:
        built.append(step)
        if step == 2:
            begun.set()
            assert gate.wait(120.0)
        return build(groups, step=step, **keywords)

    monkeypatch.setattr(batch_server, "build_batch", slow)
    async with running(make_run(tmp_path), StubEngine()) as loop:
        await loop.train(1, 1)
        trained = {group.index for group in loop.last_groups()}
        path = "/dock/batch/2?rank=0&world_size=1&wait_s=20"
        reader, writer = await asyncio.open_connection(loop.client._host, loop.client._port)
        headers = {"Host": "dock", **Credentials.of_run(loop.run.path, loop.attempt).headers}
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        writer.write(f"GET {path} HTTP/1.1\r\n{head}\r\n".encode())
        assert await asyncio.to_thread(begun.wait, 120.0)
        writer.close()
        # the orchestrator hears of the end, and cancels the handler
        await asyncio.sleep(0.2)
        assert reader.at_eof() or not gate.is_set()
        assert (await loop.ask("_request", "GET", path.replace("wait_s=20", "wait_s=0.05")))[0] == 204
        state = OrchestratorState.decode(await loop.ask("snapshot", 1))
        gate.set()
        first: BatchShard = await loop.batch(2)
        bodies = [(await loop.ask("_request", "GET", path))[1] for _ in range(2)]
        assert bodies[0] == bodies[1]
        assert first.step == 2
        assert built == [1, 2]
        taken = {group.index for group in loop.last_groups()}
        finished = {group.index for group in state.logged}
        assert taken <= finished
        assert not trained & (finished | set(state.restart))
        assert trained | finished | set(state.restart) == set(range(state.next_index))
        await loop.publish(2)
        assert (await loop.train(3, 4))[-1].step == 4


async def test_a_run_continues_with_other_weights_and_refuses_to_lose_an_environment(tmp_path: Path) -> None:
    run, stub = make_run(tmp_path, environments=TWO), StubEngine()
    # two batches and some more; the rest of the rollouts stays in flight
    stub.request_s = lambda number: 0.0 if number <= 40 else 30.0
    async with running(run, stub) as loop:
        await loop.train(1, 2)
        await loop.until(lambda: len(loop.parts.scheduler._running) >= 2)
        state = await loop.checkpoint(2)
    had = {each.index: each.environment for each in state.dealt}
    assert had

    def change(environments: list[dict[str, Any]]) -> None:
        value = yaml.safe_load(run.recipe_path.read_text())
        run.recipe_path.write_text(yaml.safe_dump({**value, "environments": environments}))
        run.start_attempt()

    change([{**TWO[1], "weight": 1e-9}, TWO[0]])
    again = Loop(run, [stub])
    restored = await again.restore()
    assert {task.index: task.environment.name for task in restored.restart} == had
    # what was not started yet follows the new weights
    assert {restored.order.task(state.next_index + i).environment.name for i in range(50)} == {"a"}
    used = {*had.values(), *(group.environment for group in state.finished)}
    change([{"name": "c", "kind": "words"}])
    gone = Loop(run, [stub])
    with pytest.raises(CheckpointError, match=f"no longer has: '{min(used)}' .*\n    hint: keep them"):
        await gone.restore()


async def test_a_build_that_fails_ends_the_orchestrator_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Batch:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(batch_server, "build_batch", fail)
    async with running(make_run(tmp_path), StubEngine()) as loop:
        ask = asyncio.create_task(loop.batch(1))
        assert loop.work is not None
        with pytest.raises(OSError, match="No space left"):
            await asyncio.wait_for(asyncio.shield(loop.work), 120.0)
        ask.cancel()
        await asyncio.gather(ask, return_exceptions=True)
