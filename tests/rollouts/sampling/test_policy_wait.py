"""Waits for a newer version, and how old rollouts are that run or wait for the trainer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from scheduler_lab import GROUPS, SIZE, Life, living, small_recipe
from test_scheduler import OF_ONE_VERSION, answer, settled

from hpcrl.dock.wire import decode_answer
from hpcrl.rollouts.ledger.state import OrchestratorState
from hpcrl.rollouts.sampling.policy_wait import PolicyWait
from hpcrl.rollouts.telemetry.gauges import gauges
from hpcrl.rollouts.telemetry.metrics_text import render_metrics

LEDGER: Any = SimpleNamespace(warehouse=None, not_removed=0)
LAG: Any = SimpleNamespace(summary=lambda: SimpleNamespace(p50_s=0.0, p99_s=0.0, max_s=0.0))


class Seconds:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def timed(life: Life) -> Seconds:
    """Give a scheduler that has not run yet a clock of the test."""
    seconds = Seconds()
    life.scheduler.policy_wait = PolicyWait(seconds)
    return seconds


def measured(life: Life) -> dict[str, float]:
    return gauges(life.scheduler, LAG, LEDGER)


def test_only_the_seconds_of_a_wait_are_added_up() -> None:
    seconds = Seconds()
    wait = PolicyWait(seconds)
    for waits, passed in ((False, 1.0), (True, 2.0), (True, 4.0), (False, 8.0), (True, 16.0)):
        wait.note(waits=waits)
        seconds.now += passed
    # the last one lasts
    assert wait.seconds == 2.0 + 4.0 + 16.0
    wait.note(waits=False)
    seconds.now += 32.0
    assert wait.seconds == 2.0 + 4.0 + 16.0


@pytest.mark.parametrize("order", ["arrival", "deterministic"])
async def test_rollouts_wait_for_a_version_where_only_the_bound_holds_them(tmp_path: Path, order: str) -> None:
    base = small_recipe(tmp_path)
    recipe = small_recipe(tmp_path, rollouts={**base.rollouts.model_dump(), "order": order})
    async with living(recipe, OrchestratorState.fresh(recipe)) as life:
        seconds = timed(life)
        await settled()
        # there is room for a seventh group, and version 0 begins six
        assert (life.scheduler.next_index, life.scheduler.places) == (OF_ONE_VERSION, (OF_ONE_VERSION + 1) * SIZE)
        seconds.now += 5.0
        assert life.scheduler.policy_wait.seconds == 5.0
        life.serve(1)
        await settled()
        # now `max_in_flight` holds them, and no version would change that
        assert life.scheduler.next_index == OF_ONE_VERSION + 1
        seconds.now += 7.0
        assert measured(life)["wait_for_policy_s"] == 5.0


async def test_a_version_that_would_not_help_is_not_waited_for(tmp_path: Path) -> None:
    """The bound lets nothing begin, and there is no room in flight either."""
    base = small_recipe(tmp_path)
    rollouts = {**base.rollouts.model_dump(), "max_in_flight": OF_ONE_VERSION * SIZE}
    recipe = small_recipe(tmp_path, rollouts=rollouts)
    async with living(recipe, OrchestratorState.fresh(recipe)) as life:
        seconds = timed(life)
        await settled()
        assert life.scheduler.account.capacity == 0
        seconds.now += 5.0
        assert life.scheduler.policy_wait.seconds == 0.0


async def test_nothing_waits_for_a_version_after_the_last_step(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path)
    async with living(recipe, OrchestratorState.fresh(recipe)) as life:
        await settled()
        await answer(life)
        seconds = timed(life)
        await life.scheduler.drain()
        await settled()
        # finished groups take all places of the version
        assert life.scheduler.account.capacity == 0
        seconds.now += 5.0
        assert life.scheduler.policy_wait.seconds == 0.0


async def test_a_batch_has_the_wait_since_the_one_before(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path)
    async with living(recipe, OrchestratorState.fresh(recipe)) as life:
        seconds, found = timed(life), []
        life.desk.gate.set()
        await settled()
        for step, passed in ((1, 3.0), (2, 4.0)):
            seconds.now += passed
            await answer(life)
            data = await life.desk.batch(step, rank=0, world_size=1, wait_s=20.0)
            assert data is not None
            found.append(decode_answer(data).stats)
            life.serve(step)
        assert [stats.wait_for_policy_s for stats in found] == [3.0, 4.0]
        # the model of the recipe does not exist, so that its operations are unknown
        assert [stats.model_flops for stats in found] == [None, None]
        assert sorted(group for groups in found[0].environments.values() for group in groups) == [0, 1, 2]
        assert set(found[0].environments) <= {"a", "b"}


async def test_rollouts_in_the_queue_and_in_flight_have_their_staleness(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path)
    async with living(recipe, OrchestratorState.fresh(recipe)) as life:
        await settled()
        found = measured(life)
        assert (found["in_queue"], found["in_flight"]) == (0, OF_ONE_VERSION * SIZE)
        # nothing waits: there is no staleness, and the curve has no point
        assert not any(name.startswith("in_queue_staleness") for name in found)
        assert (found["in_flight_staleness_mean"], found["in_flight_staleness_max"]) == (0.0, 0)
        await answer(life, count=4 * SIZE)
        found = measured(life)
        assert (found["in_queue"], found["in_queue_staleness_mean"], found["in_queue_staleness_max"]) == (8, 0.0, 0)
        life.scheduler.take_batch()
        life.serve(1)
        await settled()
        # of version 0 two groups run, and the others of version 1
        young = life.scheduler.in_flight - 2 * SIZE
        assert measured(life)["in_flight_staleness_mean"] == pytest.approx(2 * SIZE / (2 * SIZE + young))
        assert measured(life)["in_flight_staleness_max"] == 1
        await answer(life)
        # the trainer has version 1 when it trains on the next batch: groups of version 0 are one version behind
        found = measured(life)
        ages = sorted(life.scheduler.staleness_in_queue())
        assert found["in_queue"] == len(ages)
        assert ages.count(1) == (OF_ONE_VERSION - GROUPS) * SIZE
        assert found["in_queue_staleness_mean"] == pytest.approx(ages.count(1) / len(ages))
        assert found["in_queue_staleness_max"] == 1
        text = render_metrics({}, found, {})
        assert "\nhpcrl_rollouts_in_queue_staleness_max 1\n" in text
        assert "# TYPE hpcrl_rollouts_wait_for_policy_seconds_total counter" in text
