"""What a restore keeps of groups that were started: those of the checkpoint, and those that the ledger has too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import make_recipe

from hpcrl.config.recipe import Recipe
from hpcrl.rollouts.core.records import Group
from hpcrl.rollouts.environments import build_environments
from hpcrl.rollouts.environments.data_order import DataOrder
from hpcrl.rollouts.ledger.ledger import RestoredRollouts
from hpcrl.rollouts.ledger.state import DispatchedGroup, OrchestratorState


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return make_recipe(tmp_path)


def group(order: DataOrder, index: int) -> Group:
    task = order.task(index)
    return Group(index=index, environment=task.environment.name, prompt_index=task.prompt_index, rollouts=[])


def state_of(
    recipe: Recipe, order: DataOrder, *, restart: list[int], finished: list[int], **changes: Any
) -> OrchestratorState:
    """After step 7, with groups up to 9 started."""
    counters = OrchestratorState.fresh(recipe).counters
    counters.finished, counters.turns_given_up = 40, 3
    tasks = {index: order.task(index) for index in restart}
    values = {
        "step": 7,
        "seed": recipe.seed,
        "group_size": recipe.rollouts.group_size,
        "next_index": 10,
        "restart": restart,
        "dealt": [DispatchedGroup(index, task.environment.name, task.prompt_index) for index, task in tasks.items()],
        "finished": [group(order, index) for index in finished],
        "counters": counters,
    }
    return OrchestratorState(**{**values, **changes})


def test_what_the_ledger_has_is_kept_and_what_is_over_is_not(recipe: Recipe) -> None:
    order = DataOrder(recipe, build_environments(recipe))
    state = state_of(recipe, order, restart=[4, 5, 6, 9], finished=[7, 8])
    newer = group(order, 8)
    found = RestoredRollouts(
        finished={5: group(order, 5), 8: newer, 11: group(order, 11)},
        parts={6: group(order, 6)},
        over=frozenset({4, 7, 10}),
        next_index=13,
        count=50,
        given_up=2,
    )
    kept = state.with_ledger(found)
    assert [each.index for each in kept.finished] == [5, 8, 11]
    assert kept.finished[1] is newer
    # 4 was trained, 5 has finished meanwhile
    assert kept.restart == [6, 9]
    assert (kept.next_index, kept.counters.finished, kept.counters.turns_given_up) == (13, 50, 5)
    assert (kept.step, kept.seed, kept.group_size) == (7, recipe.seed, recipe.rollouts.group_size)
    # and those that were started after the checkpoint, as they were
    again = state.groups_to_redispatch(order, found)
    assert [task.index for task in again] == [6, 9, 12]
    assert again == [order.task(index) for index in (6, 9, 12)]


def test_a_ledger_that_knows_less_takes_nothing_away(recipe: Recipe) -> None:
    order = DataOrder(recipe, build_environments(recipe))
    state = state_of(recipe, order, restart=[4, 9], finished=[8])
    nothing = RestoredRollouts(finished={}, parts={}, over=frozenset(), next_index=3, count=12)
    kept = state.with_ledger(nothing)
    assert kept == state
    assert [task.index for task in state.groups_to_redispatch(order, nothing)] == [4, 9]
