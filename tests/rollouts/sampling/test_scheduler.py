"""What the scheduler starts, ends and counts, with engines that answer when a test says so."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from patience import patience
from scheduler_lab import GROUPS, SIZE, Life, Unwritten, living, small_recipe

from hpcrl.config.recipe import Recipe
from hpcrl.errors import HpcrlError, RunDirError
from hpcrl.rollouts.engines.client import EngineError
from hpcrl.rollouts.environments.data_order import GroupTask
from hpcrl.rollouts.ledger.state import OrchestratorState
from hpcrl.rollouts.sampling.conversation import Conversation
from hpcrl.rollouts.sampling.failures import FailureCount
from hpcrl.rollouts.sampling.routed_experts_budget import RoutedExpertsBudget

#: groups that version 0 may begin with a bound of one step
OF_ONE_VERSION = 2 * GROUPS


def recipe_of(tmp_path: Path, **rollouts: Any) -> Recipe:
    base = small_recipe(tmp_path)
    return small_recipe(tmp_path, rollouts={**base.rollouts.model_dump(), **rollouts})


def began(recipe: Recipe, **more: Any) -> Any:
    return living(recipe, OrchestratorState.fresh(recipe), **more)


async def settled(turns: int = 200) -> None:
    """Let everything happen that waits for no answer of an engine."""
    for _ in range(turns):
        await asyncio.sleep(0)


async def answer(life: Life, error: Exception | None = None, *, count: int | None = None) -> None:
    """Answer the requests that wait, or the first ``count`` of them."""
    for waiting in life.pool.waiting[:count]:
        if error is None:
            waiting.set_result(None)
        else:
            waiting.set_exception(error)
    await settled()


async def until_it_raises(life: Life) -> None:
    """Run the scheduler once more, which raises what ended it before."""
    async with asyncio.timeout(20.0 * patience()):
        await life.scheduler.run()


async def test_whole_groups_run_up_to_the_limit(tmp_path: Path) -> None:
    async with began(recipe_of(tmp_path, max_in_flight=2 * SIZE + 1)) as life:
        scheduler = life.scheduler
        await settled()
        assert (scheduler.in_flight, scheduler.places, scheduler.next_index) == (2 * SIZE, 2 * SIZE + 1, 2)
        assert len(life.pool.waiting) == 2 * SIZE
        # rollouts that have ended make room, also those of a group that still runs
        await answer(life, count=1)
        assert (scheduler.in_flight, scheduler.next_index) == (2 * SIZE + 1, 3)
        await answer(life, count=1)
        assert (scheduler.in_flight, scheduler.next_index) == (2 * SIZE, 3)
        assert scheduler.pending(0).counters.started == 3 * SIZE  # type: ignore[union-attr]


async def test_a_limit_that_is_raised_lets_more_groups_start_at_once(tmp_path: Path) -> None:
    async with began(recipe_of(tmp_path, max_in_flight=SIZE)) as life:
        await settled()
        assert life.scheduler.in_flight == SIZE
        life.scheduler.set_limit(3 * SIZE)
        await settled()
        assert life.scheduler.in_flight == life.scheduler.places == 3 * SIZE


async def test_what_runs_when_the_limit_is_lowered_continues(tmp_path: Path) -> None:
    async with began(recipe_of(tmp_path, max_in_flight=3 * SIZE)) as life:
        await settled()
        life.scheduler.set_limit(SIZE)
        await settled()
        assert life.scheduler.in_flight == 3 * SIZE
        await answer(life, count=2 * SIZE)
        assert (life.scheduler.in_flight, life.scheduler.next_index) == (SIZE, 3)


async def test_a_version_opens_places_for_as_many_groups_as_a_step_has(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, max_in_flight=100 * SIZE)
    async with began(recipe) as life:
        await settled()
        assert life.scheduler.next_index == OF_ONE_VERSION
        life.serve(1)
        await settled()
        assert life.scheduler.next_index == OF_ONE_VERSION + GROUPS
        life.scheduler.serve(0)  # said late
        await settled()
        assert (life.scheduler.account.version, life.scheduler.next_index) == (1, OF_ONE_VERSION + GROUPS)


async def test_after_the_last_step_nothing_starts_any_more(tmp_path: Path) -> None:
    async with began(recipe_of(tmp_path)) as life:
        await settled()
        running = set(range(life.scheduler.next_index))
        assert len(running) == OF_ONE_VERSION
        await life.scheduler.drain()
        assert (life.scheduler.in_flight, life.scheduler.account.running, life.pool.waiting) == (0, 0, [])
        # there is room, also for the groups that were aborted, and it is used no more
        life.serve(1)
        await settled()
        assert (life.scheduler.in_flight, life.pool.waiting) == (0, [])
        assert {task.index for task in life.scheduler.pending(0).restart} == running  # type: ignore[union-attr]
        assert life.scheduler.pending(0).counters.started == len(running) * SIZE  # type: ignore[union-attr]


@pytest.mark.parametrize("order", ["arrival", "deterministic"])
async def test_after_the_last_step_engines_take_its_weights(tmp_path: Path, order: str) -> None:
    """In deterministic order they would take others only when all groups of the version had ended."""
    async with began(recipe_of(tmp_path, order=order, max_off_policy_steps=3)) as life:
        await settled()
        assert life.scheduler.choose_version(1) == (1 if order == "arrival" else 0)
        notified = life.pool.notified
        await life.scheduler.drain()
        await settled()
        assert life.scheduler.choose_version(1) == 1
        assert life.pool.notified > notified


@pytest.mark.parametrize("full", [False, True])
async def test_where_memory_is_full_no_group_starts_while_a_batch_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    """In deterministic order, where nothing else holds groups back that the version may begin."""
    monkeypatch.setattr(Unwritten, "full", full)
    recipe = recipe_of(tmp_path, order="deterministic", max_off_policy_steps=3, max_in_flight=2 * SIZE)
    async with began(recipe) as life:
        await settled()
        while life.pool.waiting:
            await answer(life, count=SIZE)
        # a batch is whole with the third; the fourth ran already
        assert life.scheduler.next_index == (GROUPS + 1 if full else 4 * GROUPS)
        assert life.scheduler.account.waiting == life.scheduler.next_index


async def test_engines_are_notified_when_all_groups_of_a_version_have_ended(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, order="deterministic", max_in_flight=100 * SIZE)
    async with began(recipe) as life:
        await settled()
        await answer(life, count=OF_ONE_VERSION * SIZE - 1)
        assert (life.pool.notified, life.scheduler.choose_version(1)) == (0, 0)
        await answer(life)
        assert life.pool.notified > 0
        assert life.scheduler.choose_version(1) == 1


async def test_a_batch_is_waited_for_until_its_last_group_has_ended(tmp_path: Path) -> None:
    async with began(recipe_of(tmp_path, max_in_flight=GROUPS * SIZE)) as life:
        waiting = asyncio.create_task(life.scheduler.wait_batch())
        await settled()
        await answer(life, count=GROUPS * SIZE - 1)
        assert not waiting.done()
        await answer(life, count=1)
        assert waiting.done()
        groups = life.scheduler.take_batch()
        assert [group.index for group in groups] == [0, 1, 2]
        assert [[rollout.member for rollout in group.rollouts] for group in groups] == [[0, 1]] * 3
        assert life.scheduler.pending(1).counters.consumed == GROUPS * SIZE  # type: ignore[union-attr]
        assert life.scheduler.pending(1).finished == []  # type: ignore[union-attr]
        assert life.scheduler.pending(0).finished == groups  # type: ignore[union-attr]
        life.scheduler.settle(1)
        assert life.scheduler.pending(0) is None


async def test_a_group_that_loses_a_member_to_an_engine_is_dropped_and_another_starts(tmp_path: Path) -> None:
    async with began(recipe_of(tmp_path, max_in_flight=SIZE)) as life:
        await settled()
        await answer(life, count=1)
        await answer(life, EngineError("it went away"))
        assert life.journal.ended == [(0, "too few members of its group finished: [0], step None")]
        assert life.scheduler.next_index == 2
        counters = life.scheduler.pending(0).counters  # type: ignore[union-attr]
        assert (counters.dropped_engine, counters.dropped_environment, counters.dropped_group) == (1, 0, 1)
        assert (counters.started, counters.finished) == (2 * SIZE, 1)


async def test_an_error_of_an_environment_costs_its_rollout_alone(tmp_path: Path) -> None:
    async with began(recipe_of(tmp_path, max_in_flight=2 * SIZE)) as life:
        await settled()
        await answer(life, ZeroDivisionError("of the environment"), count=1)
        await answer(life, count=3)
        assert life.journal.ended == [(0, "too few members of its group finished: [1], step None"), (1, "kept")]
        counters = life.scheduler.pending(0).counters  # type: ignore[union-attr]
        assert (counters.dropped_engine, counters.dropped_environment, counters.dropped_group) == (0, 1, 1)
        assert counters.finished == 3


async def test_groups_of_equal_rewards_are_counted_and_dropped_where_the_recipe_drops_them(tmp_path: Path) -> None:
    for zero_variance, ended in (("keep", "kept"), ("drop", "no variance in its group: [0, 1], step None")):
        async with began(recipe_of(tmp_path, max_in_flight=SIZE, zero_variance=zero_variance)) as life:
            await settled()
            await answer(life)
            assert life.journal.ended == [(0, ended)]
            counters = life.scheduler.pending(0).counters  # type: ignore[union-attr]
            assert counters.zero_variance_groups == 1
            assert counters.dropped_zero_variance == (SIZE if zero_variance == "drop" else 0)


async def test_what_a_step_makes_too_old_is_given_up_and_its_places_are_free(tmp_path: Path) -> None:
    """Of a bound of one step: when the second batch is taken, a group of version 0 that runs can never be used."""
    async with began(recipe_of(tmp_path, max_in_flight=100 * SIZE)) as life:
        life.pool.slow = {0}
        await settled()
        for step in (1, 2):
            while life.scheduler.account.waiting < GROUPS:
                await answer(life, count=SIZE)
            life.scheduler.take_batch()
            life.serve(step)
            await settled()
        assert life.journal.ended[-1] == (0, "too old: [], step 2")
        assert 0 not in {task.index for task in life.scheduler.pending(2).restart}  # type: ignore[union-attr]
        assert life.scheduler.pending(2).counters.cancelled_stale == SIZE  # type: ignore[union-attr]
        assert life.scheduler.in_flight == len(life.pool.waiting)
        # before that step it was one of those in flight
        before = life.scheduler.pending(1)
        assert before is not None
        assert before.restart[0].index == 0
        assert before.counters.cancelled_stale == 0


async def test_an_answer_that_cannot_be_used_ends_the_run(tmp_path: Path) -> None:
    async with began(recipe_of(tmp_path)) as life:
        await settled()
        await answer(life, HpcrlError("experts of another model"), count=1)
        with pytest.raises(HpcrlError, match="experts of another model"):
            await until_it_raises(life)
        # what was in flight is to be started again
        assert life.scheduler.in_flight == 0
        assert len(life.scheduler.pending(0).restart) == OF_ONE_VERSION  # type: ignore[union-attr]


async def test_a_finished_rollout_that_cannot_be_kept_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(journal: Unwritten, task: GroupTask, rollout: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Unwritten, "finished", full)
    async with began(recipe_of(tmp_path)) as life:
        await settled()
        await answer(life, count=1)
        with pytest.raises(RunDirError, match=r"a finished rollout cannot be kept: .*No space left"):
            await until_it_raises(life)


async def test_a_rollout_that_is_lost_behind_its_reward_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_memory(conversation: Conversation, *given: Any, **named: Any) -> Any:
        raise MemoryError("its experts")

    monkeypatch.setattr(Conversation, "rollout", no_memory)
    async with began(recipe_of(tmp_path)) as life:
        await settled()
        await answer(life, count=1)
        with pytest.raises(HpcrlError, match="a rollout was lost: MemoryError: its experts"):
            await until_it_raises(life)


async def test_groups_that_start_again_come_before_new_ones_in_their_order(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    async with began(recipe) as life:
        await settled()
        order, state = list(life.pool.versions), life.desk.snapshot(0)
    assert order == [0, 1, 2, 3, 4, 5]
    assert state.restart == order
    small = recipe_of(tmp_path, max_in_flight=2 * SIZE)
    random.Random(0).shuffle(state.dealt)
    async with living(small, OrchestratorState.decode(state.encode())) as life:
        await settled()
        assert sorted(life.pool.versions) == [0, 1]
        await answer(life)
        assert sorted(life.pool.versions) == [0, 1, 2, 3]
        assert life.scheduler.next_index == OF_ONE_VERSION


async def test_of_a_group_that_has_rollouts_only_the_other_members_start(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, max_in_flight=SIZE)
    async with began(recipe) as life:
        await settled()
        # as where the process ended when one member had finished
        state = life.desk.snapshot(0)
        await answer(life)
        group = life.scheduler.pending(0).finished[0]  # type: ignore[union-attr]
    assert state.restart == [0]
    async with living(recipe, state, parts={0: group.rollouts[1:]}) as life:
        await settled()
        assert (life.scheduler.in_flight, len(life.pool.waiting), list(life.pool.versions)) == (1, 1, [0])
        await answer(life)
        assert life.journal.ended == [(0, "kept")]
        (again,) = life.scheduler.pending(0).finished  # type: ignore[union-attr]
        assert [rollout.member for rollout in again.rollouts] == [0, 1]
        assert again.rollouts[1] == group.rollouts[1]


async def test_memory_for_routed_experts_bounds_what_is_in_flight(tmp_path: Path) -> None:
    async with began(recipe_of(tmp_path), room=RoutedExpertsBudget(rollout_bytes=10, limit_bytes=10 * SIZE)) as life:
        await settled()
        assert (life.scheduler.in_flight, life.scheduler.places, life.scheduler.limit) == (SIZE, SIZE, 7 * SIZE)
        await answer(life)
        assert life.scheduler.in_flight == SIZE


async def test_rollouts_are_counted_where_failures_are_judged(tmp_path: Path) -> None:
    failures = FailureCount()
    async with began(recipe_of(tmp_path, max_in_flight=2 * SIZE), failures=failures) as life:
        await settled()
        await answer(life, count=2)
        await answer(life, EngineError("it went away"), count=1)
        counted = failures.report()
        assert sum(each.finished for each in counted) == 2
        assert sum(sum(each.failed.values()) for each in counted) == 1
        assert sum(each.started for each in counted) == life.scheduler.pending(0).counters.started  # type: ignore[union-attr]
        assert life.pool.left == 3
