"""Durations of the planner: what a simulation takes where nothing was measured."""

from __future__ import annotations

from statistics import mean

import pytest
from scenes import local

from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.errors import UsageError
from hpcrl.planning.calibration.calibration_file import load_calibration
from hpcrl.planning.distributions import mean_of
from hpcrl.planning.report import find_facts, make_outlook
from hpcrl.simulation import Durations, durations_from_plan


@pytest.fixture(scope="module")
def predicted() -> Durations:
    return durations_from_plan(load_recipe("glm5_swe").value, load_cluster("h200-28").value, load_calibration())


def test_rollouts_are_those_of_the_workload(predicted: Durations) -> None:
    calibration = load_calibration()
    recipe, cluster = load_recipe("glm5_swe").value, load_cluster("h200-28").value
    workload = make_outlook(recipe, cluster, calibration, find_facts(recipe)).workload
    trace = predicted.environment("swe").trace
    tokens = [sum(turn.said + turn.sampled for turn in rollout.turns) for rollout in trace]
    assert mean(tokens) == pytest.approx(workload.mean("tokens"), rel=0.01)
    assert mean(sum(turn.sampled for turn in rollout.turns) for rollout in trace) == pytest.approx(
        workload.mean("sampled"), rel=0.01
    )
    assert mean(len(rollout.turns) for rollout in trace) == pytest.approx(workload.mean("turns"), rel=0.02)
    waits = mean(sum(turn.wait_s for turn in rollout.turns) + rollout.judge_s for rollout in trace)
    assert waits == pytest.approx(workload.mean("waits"), rel=0.05)
    # long rollouts are long in every respect
    assert len(trace[-1].turns) > 3 * len(trace[0].turns)
    assert max(tokens) <= recipe.engine.max_model_len


def test_the_trainer_takes_what_the_plan_says(predicted: Durations) -> None:
    calibration = load_calibration()
    recipe, cluster = load_recipe("glm5_swe").value, load_cluster("h200-28").value
    outlook = make_outlook(recipe, cluster, calibration, find_facts(recipe))
    tokens = recipe.rollouts.rollouts_per_step * outlook.workload.mean("tokens")
    step_s = predicted.trainer.forward_backward_per_token_s * tokens + mean_of(predicted.trainer.optimizer_s)
    assert step_s == pytest.approx(outlook.tables["trainer"].seconds)
    handoff = predicted.handoff
    whole = sum(mean_of(part) for part in (handoff.publish_s, handoff.write_s, handoff.read_s, handoff.load_s))
    assert whole == pytest.approx(outlook.tables["handoff"].seconds)


def test_an_engine_is_all_of_its_ranks(predicted: Durations) -> None:
    assert predicted.engine.ranks == 64
    # the KV cache of 64 GPUs, and not of one
    assert predicted.engine.kv_tokens is not None
    assert predicted.engine.kv_tokens > 64 * 131072


def test_the_recipes_latency_counts_once() -> None:
    cluster = load_cluster("h200-28").value
    late = load_recipe("glm5_swe", ("environments.0.latency={median_s: 100}",)).value
    assert all(r.judge_s == 0 for r in durations_from_plan(late, cluster, load_calibration()).environment("swe").trace)


def test_what_the_planner_cannot_say_is_named() -> None:
    quickstart = load_recipe("quickstart").value
    with pytest.raises(UsageError, match=r"(?s)describes no hardware.*--durations"):
        durations_from_plan(quickstart, local(), load_calibration())
    with pytest.raises(UsageError, match=r"(?s)nothing says how long.*--durations"):
        durations_from_plan(quickstart, load_cluster("h200-28").value, load_calibration())
