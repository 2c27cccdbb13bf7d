"""Memory of sandboxes: how many may be open at once on a node, and what a plan and a submit say of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config.cluster import ClusterProfile, SlurmCluster
from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.config.plan import Plan, Role
from hpcrl.config.recipe import Recipe
from hpcrl.config.sandbox_use import sandbox_node
from hpcrl.jobplan import make_plan
from hpcrl.models import load_facts
from hpcrl.planning.calibration.calibration_file import load_calibration
from hpcrl.planning.documents import outlook_document
from hpcrl.planning.ledger import GIB, explain
from hpcrl.planning.memory.fit import memory_report
from hpcrl.planning.memory.sandbox_memory import SandboxMemory, open_sandboxes
from hpcrl.planning.memory.sandbox_notes import sandbox_notes, with_sandbox_limit
from hpcrl.planning.report import find_facts, make_outlook
from hpcrl.processes.environment_marks import SANDBOX_MEMORY_VARIABLE
from hpcrl.submit.prepare import prepare

GLM5 = load_facts("GLM-5")
H200 = load_cluster("h200-28").value
NO_ROUTES = ("trainer.router_replay=false", "rollouts.routes_in_flight_gib=null")

PART = "environment_workers={count: 8, per_node: 2, cpus: 16, memory_gib: 32}"


def glm5(*settings: str) -> Recipe:
    return load_recipe("glm5_swe", settings).value


def planned(*settings: str, cluster: ClusterProfile = H200) -> SandboxMemory:
    found = memory_report(glm5(*settings), cluster, GLM5).sandboxes
    assert found is not None
    return found


def test_the_reference_run_is_warned_of_the_sum_of_all_limits() -> None:
    found = planned()
    # 180 GiB of routed experts hold 787 rollouts, and an evaluation has 64 more
    assert found.count == 787 + 64
    assert found.term.value == 851 * 2 * GIB
    host = memory_report(glm5(), H200, GLM5).place(Role.TRAINER, "host")
    assert found.left == host.headroom
    assert "sandboxes" not in {term.name for term in host.ledger}
    assert explain(found.term) == (
        "sandboxes: 1702.00 GiB = Σ sandboxes · memory_gib with sandboxes of swe = 851, memory_gib of swe = 2 [limit]"
    )
    left = f"leave {(host.headroom or 0) / GIB:.1f} GiB"
    for words in ("1,702.0 GiB", "the trainer's first node", left, "0.19 GiB a sandbox"):
        assert words in found.warning


def test_the_number_that_the_warning_names_fits_and_one_more_does_not() -> None:
    key = "environments.0.max_sandboxes"
    assert f"All fit with {key}=79;" in planned().warning
    assert planned(f"{key}=79").warning == ""
    assert planned(f"{key}=80").warning


def test_rollouts_in_flight_and_max_sandboxes_each_limit_their_number() -> None:
    assert planned(*NO_ROUTES).count == 2048
    assert planned(*NO_ROUTES, "rollouts.max_in_flight=256", "evaluation.prompts=32").count == 256 + 32
    sets = "evaluation.sets=[{name: more, prompts: 10, samples: 4}]"
    assert planned(*NO_ROUTES, "rollouts.max_in_flight=256", "evaluation.prompts=32", sets).count == 256 + 72
    assert planned("environments.0.max_sandboxes=100").count == 100


def test_workers_share_rollouts_and_have_their_own_slots() -> None:
    found = planned("environment_workers={count: 8, per_node: 2}")
    # each of two workers of eight has a quarter of 851 rollouts
    assert (found.node.role, found.count, found.warning) == (Role.ENV, 213, "")
    host = memory_report(glm5("environment_workers={count: 8, per_node: 2}"), H200, GLM5).place(Role.ENV, "host")
    assert found.left == host.headroom
    few = ("environments.0.max_sandboxes=50",)
    assert planned("environment_workers={count: 8, per_node: 2}", *few).count == 100
    assert planned("environment_workers={count: 4, placement: trainer_node}", *few).count == 200
    part = planned(PART)
    assert (part.node.memory_gib, part.node.cpus) == (64, 32)
    assert "set environment_workers.count" in part.warning
    # of one worker: both fit with that
    most = int(part.warning.partition("max_sandboxes=")[2].partition(";")[0])
    assert planned(PART, f"environments.0.max_sandboxes={most}").fits
    assert not planned(PART, f"environments.0.max_sandboxes={most + 1}").fits


def test_an_orchestrator_on_its_own_node_has_the_sandboxes_there() -> None:
    assert isinstance(H200, SlurmCluster)
    placement = H200.placement.model_copy(update={"by_role": {**H200.placement.by_role, Role.ORCHESTRATOR: "cpu"}})
    partitions = {**H200.partitions, "cpu": H200.partitions["gpu"]}
    placed = H200.model_copy(update={"partitions": partitions, "placement": placement})
    found = planned(cluster=placed)
    assert found.node.role is Role.ORCHESTRATOR
    # the trainer's ranks are elsewhere
    assert (found.left or 0) > (planned().left or 0) + 1000 * GIB


def local(*environments: dict[str, Any], memory_gib: float | None = None) -> tuple[Recipe, ClusterProfile]:
    recipe = load_recipe("quickstart", [f"environments={json.dumps(environments)}"]).value
    return recipe, load_cluster("local").value.model_copy(update={"memory_gib": memory_gib})


def limit_in(plan: Plan | None, role: Role = Role.ORCHESTRATOR) -> str:
    """Variable of the role; no other role has it."""
    assert plan is not None
    found = {group.role: group.env.get(SANDBOX_MEMORY_VARIABLE, "") for group in plan.groups}
    assert {each for each, value in found.items() if value} <= {role}
    return found[role]


def submitted(tmp_path: Path, *settings: str) -> Plan | None:
    return prepare("glm5_swe", "h200-28", settings, environ={}, cwd=tmp_path, name="one", programs=False).outlined()


def test_a_run_limits_its_sandboxes_to_what_the_plan_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    limit, _, name = limit_in(submitted(tmp_path)).partition(":")
    assert int(limit) == planned().limit == planned().left
    assert re.fullmatch("[0-9a-f]{32}", name)
    assert f"Where all together use more than {int(limit) / GIB:,.1f} GiB, the largest ends" in planned().warning
    # a run of another name has its own
    other = prepare("glm5_swe", "h200-28", (), environ={}, cwd=tmp_path, name="two", programs=False).plan
    assert limit_in(other).partition(":")[2] != name
    given = "rollouts.sandboxes_gib=100"
    assert limit_in(submitted(tmp_path, given)).partition(":")[0] == str(100 * GIB)
    assert planned(given).limit == 100 * GIB
    assert (
        outlook_document(make_outlook(glm5(given), H200, load_calibration(None), find_facts(glm5())))["memory"][
            "sandboxes"
        ]["limit_bytes"]
        == 100 * GIB
    )


def test_workers_have_the_limit_and_equal_parts_of_their_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    whole, part = planned("environment_workers={count: 8, per_node: 2}"), planned(PART)
    assert (whole.node.parts, whole.limit) == (1, whole.left)
    assert (part.node.parts, part.limit) == (2, (part.left or 0) // 2)
    assert "Where all of one worker use more than" in part.warning
    limit = limit_in(submitted(tmp_path, PART), Role.ENV).partition(":")[0]
    assert int(limit) == part.limit
    assert planned(PART, "rollouts.sandboxes_gib=40").limit == 20 * GIB
    # all eight are on this machine, and each has a limit of its own
    here = sandbox_node(glm5(PART), load_cluster("local").value)
    assert (here.processes, here.parts) == (8, 8)


def test_a_limit_holds_one_sandbox_and_is_unknown_where_the_memory_is(tmp_path: Path) -> None:
    swe = {"name": "swe", "kind": "swe", "tasks": "t", "memory_gib": 4.0}
    for left, limit in ((-GIB, 4 * GIB), (5 * GIB, 5 * GIB), (None, None)):
        found = open_sandboxes(*local(swe), None, left)
        assert found is not None
        assert found.limit == limit
    plain = {"name": "reverse", "kind": "words", "task": "reverse"}
    for environment, memory_gib, limit in ((swe, None, ""), (swe, 79.0, str(79 * GIB)), (plain, 79.0, "")):
        recipe, cluster = local(environment, memory_gib=memory_gib)
        made = make_plan(recipe, cluster, "one", tmp_path / "one")
        assert limit_in(with_sandbox_limit(made, recipe, cluster)).partition(":")[0] == limit
    # a recipe does not tell the sandboxes of an environment of one's own
    given = recipe.rollouts.model_copy(update={"sandboxes_gib": 3.0})
    made = with_sandbox_limit(made, recipe.model_copy(update={"rollouts": given}), cluster)
    assert limit_in(made).partition(":")[0] == str(3 * GIB)


def test_the_largest_sandboxes_count_first_and_a_rollout_has_one() -> None:
    tasks = {"kind": "harness", "path": "t.jsonl", "command": ["true"], "sandbox": {"memory_gib": 3.0}}
    rewards = [{"kind": "code", "memory_gib": gib, "name": f"code{gib:g}"} for gib in (8.0, 6.0)]
    code = {"kind": "dataset", "path": "t.jsonl", "checker_processes": 5, "rewards": rewards}
    swe = {"name": "swe", "kind": "swe", "tasks": "t", "max_sandboxes": 7, "memory_gib": 4.0}
    recipe, cluster = local({"name": "program", **tasks}, {"name": "code", **code}, swe)
    found = open_sandboxes(recipe, cluster, None, 100 * GIB)
    assert found is not None
    rollouts = recipe.rollouts.max_in_flight + min(recipe.rollouts.max_in_flight, recipe.evaluation.prompts)
    assert [(kind.use.environment, kind.count) for kind in found.kinds] == [
        ("code", 5),
        ("swe", 7),
        ("program", rollouts - 12),
    ]
    assert found.term.value == (5 * 8 + 7 * 4 + (rollouts - 12) * 3) * GIB
    keys = "environments.1.rewards.0.memory_gib and environments.2.max_sandboxes and environments.0.sandbox.memory_gib"
    assert f"Lower {keys}, or" in found.warning
    assert "(5 of rewards of code x 8, 7 of swe x 4, " in found.warning
    plain, _ = local({"name": "reverse", "kind": "words", "task": "reverse"})
    assert open_sandboxes(plain, cluster, None, 1) is None


def test_a_submit_knows_less_where_the_model_is_unknown() -> None:
    swe = {"name": "swe", "kind": "swe", "tasks": "t", "max_sandboxes": 20, "memory_gib": 4.0}
    assert sandbox_notes(*local(swe)) == []
    assert sandbox_notes(*local(swe, memory_gib=80.0)) == []
    [note] = sandbox_notes(*local(swe, memory_gib=79.0))
    assert "on this machine, which has 79.0 GiB (4 GiB a sandbox)" in note
    recipe, cluster = local(swe, memory_gib=79.0)
    for payload in ("probe", "evaluation"):
        job = recipe.job.model_copy(update={"payload": payload})
        assert sandbox_notes(recipe.model_copy(update={"job": job}), cluster) == []


def test_a_submit_says_what_the_plan_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    prepared = prepare("glm5_swe", "h200-28", (), environ={}, cwd=tmp_path, programs=False)
    assert planned().warning in prepared.notes
    fitting = prepare(
        "glm5_swe", "h200-28", ("environments.0.max_sandboxes=79",), environ={}, cwd=tmp_path, programs=False
    )
    assert not [note for note in fitting.notes if "sandboxes" in note]


def test_a_plan_expects_programs_by_littles_law() -> None:
    recipe = glm5()
    outlook = make_outlook(recipe, H200, load_calibration(None), find_facts(recipe))
    assert outlook.loop is not None
    expected = outlook.loop.started_per_s * outlook.workload.mean("waits")
    assert outlook.sandbox_programs == pytest.approx(expected)
    found = outlook_document(outlook)["memory"]["sandboxes"]
    assert (found["count"], found["bytes"], found["fits"], found["cpus"]) == (851, 1702 * GIB, False, 192)
    assert found["programs"] == pytest.approx(expected)
    assert found["left_bytes"] == planned().left


def test_an_evaluation_has_its_sandboxes_with_the_engines() -> None:
    recipe = glm5("job.payload=evaluation")
    assert sandbox_node(recipe, H200).role is Role.ENGINE
    found = memory_report(recipe, H200, GLM5).sandboxes
    # prefill and decode have different nodes, and it may be on either
    assert found is not None
    assert (found.left, found.warning) == (None, "")
