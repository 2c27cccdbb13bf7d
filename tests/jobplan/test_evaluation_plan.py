"""The plan of a run that only evaluates: engines and an orchestrator, and nothing of a trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.config.plan import FileProbe, Plan, Role
from hpcrl.jobplan import make_plan
from hpcrl.submit.evaluation import EvaluationRequest, evaluation_settings

RUN_DIR = Path("/runs/night-1")


def plan_of(recipe: str, cluster: str, *settings: str) -> Plan:
    changed = [*settings, *evaluation_settings(recipe, settings, EvaluationRequest(samples=4))]
    return make_plan(load_recipe(recipe, changed).value, load_cluster(cluster).value, "n", RUN_DIR)


def test_a_local_evaluation_has_no_trainer() -> None:
    plan = plan_of("quickstart", "local")
    assert [group.role for group in plan.groups] == [Role.ENGINE, Role.ORCHESTRATOR]
    engine, orchestrator = plan.groups
    assert orchestrator.command[-1] == "hpcrl.rollouts.evaluating"
    assert orchestrator.policy.ends_run
    assert isinstance(orchestrator.ready, FileProbe)
    assert not engine.policy.ends_run
    command = list(engine.command)
    assert command[command.index("--weight-version") + 1] == "0"


@pytest.mark.parametrize(("recipe", "roles"), [("glm5_swe", {"prefill", "decode"}), ("qwen3_30b_a3b", {"engine"})])
def test_jobs_are_of_the_engines_alone(recipe: str, roles: set[str]) -> None:
    plan = plan_of(recipe, "h200-28")
    assert Role.TRAINER not in {group.role for group in plan.groups}
    assert {role for component in plan.layout.components for role in component.roles} == roles
    training = make_plan(load_recipe(recipe).value, load_cluster("h200-28").value, "n", RUN_DIR)
    nodes = {role: sum(g.replicas * g.nodes for g in training.groups if g.role == role) for role in roles}
    assert sum(component.nodes for component in plan.layout.components) == sum(nodes.values())
    orchestrator = plan.group(Role.ORCHESTRATOR)
    assert orchestrator.beside


def test_what_shares_the_trainers_node_gets_nodes() -> None:
    settings = evaluation_settings(
        "quickstart", ("engine.placement=colocated", "job.layout=elastic", "job.min_replicas=2"), EvaluationRequest()
    )
    assert settings[-3:] == ["engine.placement=apart", "job.layout=auto", "job.min_replicas=1"]
