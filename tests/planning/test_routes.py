"""Room for routed experts: a plan and a simulation say of rollouts in flight what the orchestrator does."""

from __future__ import annotations

import pytest

from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.config.plan import Role
from hpcrl.config.recipe import Recipe
from hpcrl.models.known import load_facts
from hpcrl.planning.calibration.calibration_file import load_calibration
from hpcrl.planning.ledger import GIB
from hpcrl.planning.memory.remedies import why_not
from hpcrl.planning.report import find_facts, make_outlook
from hpcrl.planning.routes import max_rollouts_in_flight, token_routes_bytes
from hpcrl.rollouts.sampling.routed_experts import RoutedExpertsSettings
from hpcrl.rollouts.sampling.routed_experts_budget import RoutedExpertsBudget
from hpcrl.simulation import durations_from_plan, make_scenario

REPLAY = "engine.return_routed_experts=true"
NO_LIMIT = "rollouts.routes_in_flight_gib=null"


def glm5(*settings: str) -> Recipe:
    """Return the reference run without its limit of rows."""
    return load_recipe("glm5_swe", (REPLAY, NO_LIMIT, *settings)).value


@pytest.mark.parametrize("model", ["GLM-5", "Qwen3-30B-A3B", "Kimi-K2-Instruct", "Qwen3-Next-80B-A3B-Instruct"])
def test_a_token_has_as_many_bytes_as_the_orchestrator_counts(model: str) -> None:
    recipe = glm5(f"model.path=models/{model}")
    settings = RoutedExpertsSettings.of(recipe)
    assert settings is not None
    assert token_routes_bytes(load_facts(recipe.model.path)) == settings.token_bytes


@pytest.mark.parametrize("gib", [0.1, 3, 40, 150, 5000])
def test_as_many_rollouts_run_as_the_orchestrator_would_start(gib: float) -> None:
    """From one that fits into nothing to more than may run for other reasons."""
    recipe = glm5(f"rollouts.routes_in_flight_gib={gib}")
    room = RoutedExpertsBudget.of(recipe, RoutedExpertsSettings.of(recipe), on_full=lambda places, gib: None)
    expected = room.bound(recipe.rollouts.max_in_flight, recipe.rollouts.group_size)
    flying, by = max_rollouts_in_flight(recipe, load_facts(recipe.model.path))
    assert flying == expected
    assert (by == "max_in_flight") == (expected == recipe.rollouts.max_in_flight)


def test_without_routes_or_without_a_limit_there_is_none() -> None:
    facts = load_facts("models/GLM-5")
    recipe = load_recipe("glm5_swe", ("trainer.router_replay=false", "rollouts.routes_in_flight_gib=0.1")).value
    assert max_rollouts_in_flight(recipe, facts) == (recipe.rollouts.max_in_flight, "max_in_flight")
    assert max_rollouts_in_flight(glm5(), facts) == (recipe.rollouts.max_in_flight, "max_in_flight")


def test_plan_and_simulation_have_no_more_in_flight() -> None:
    """The plan names the setting that holds them; the step is longer for it."""
    cluster = load_cluster("h200-28").value
    calibration = load_calibration(None)
    strict, loose = glm5("rollouts.routes_in_flight_gib=20"), glm5()
    held, free = (make_outlook(recipe, cluster, calibration, find_facts(recipe)).loop for recipe in (strict, loose))
    assert held is not None
    assert free is not None
    places, by = max_rollouts_in_flight(strict, load_facts(strict.model.path))
    assert held.in_flight <= places < free.in_flight
    assert held.in_flight_limit == by == "rollouts.routes_in_flight_gib"
    assert held.step_s > free.step_s
    durations = durations_from_plan(strict, cluster, calibration)
    assert make_scenario(strict, cluster, durations, days=0.01).size.max_in_flight == places
    assert make_scenario(loose, cluster, durations, days=0.01).size.max_in_flight == loose.rollouts.max_in_flight


def test_the_reference_run_with_replay_fits_with_room_for_fewer_rows() -> None:
    """As it is, and not without its limit: that needs one of two settings, or the limit that a hint names."""
    cluster = load_cluster("h200-28").value
    assert why_not(load_recipe("glm5_swe").value, cluster, load_facts("models/GLM-5")) == ()
    replay = (NO_LIMIT,)
    recipe = load_recipe("glm5_swe", replay).value
    (short,) = why_not(recipe, cluster, load_facts(recipe.model.path))
    assert (short.place.role, short.place.kind) == (Role.TRAINER, "host")
    assert round(short.missing / GIB) == 130
    (knob,) = [knob for knob in short.knobs if knob.changes[0][0] == "rollouts.routes_in_flight_gib"]
    found = {}
    limits = [f"rollouts.routes_in_flight_gib={gib}" for gib in (knob.changes[0][1], 180)]
    for setting in (*limits, "checkpoint.mode=sync"):
        bounded = load_recipe("glm5_swe", (*replay, setting)).value
        outlook = make_outlook(bounded, cluster, load_calibration(None), find_facts(bounded))
        assert outlook.memory is not None
        assert not outlook.memory.short
        assert outlook.loop is not None
        found[setting] = outlook.loop
    # none costs time: more rollouts would only wait for the trainer
    assert [loop.in_flight_limit for loop in found.values()] == ["trainer"] * 3
    assert len({round(loop.trainer_s) for loop in list(found.values())[:2]}) == 1
    assert all(loop.step_s == loop.trainer_s for loop in found.values())
