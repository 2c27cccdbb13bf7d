"""Workers of environments in plans: their nodes, parts of nodes, steps, memory, interpreters, and wrong settings."""

from __future__ import annotations

from pathlib import Path

import pytest
from plans import CWD, allocations_for, plan_for

from hpcrl.cli import scale
from hpcrl.config.joined import for_job
from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.config.plan import HttpProbe, Plan, Role
from hpcrl.config.rules.table import check_rules
from hpcrl.errors import ConfigError, UsageError
from hpcrl.jobplan import absolute_paths, make_plan
from hpcrl.jobplan.role_python import environment_role, role_python
from hpcrl.models import load_facts
from hpcrl.planning.ledger import GIB
from hpcrl.planning.memory.fit import memory_report
from hpcrl.rollouts.parts import gateway_host
from hpcrl.runs.role import Endpoints
from hpcrl.runs.rundir import RunDir
from hpcrl.slurm.launch_arguments import launch_replica
from hpcrl.slurm.render import render_jobs

WHOLE = "environment_workers={count: 2}"
PARTS = "environment_workers={count: 3, per_node: 2, cpus: 2, memory_gib: 0.5}"


def steps(plan: Plan) -> list[tuple[str, tuple[str, ...]]]:
    """Node and options of the step of each worker."""
    group, allocations = plan.group(Role.ENV), allocations_for(plan)
    launches = [
        launch_replica(plan, group, replica, command=["true"], cwd=CWD, allocations=allocations)
        for replica in range(group.replicas)
    ]
    kept = ("--exact", "--cpus", "--mem", "--overlap", "--gres", "--gpus", "--het-group")
    return [(launch.hosts[0], tuple(word for word in launch.argv if word.startswith(kept))) for launch in launches]


def test_each_worker_has_a_node(tmp_path: Path) -> None:
    plan, cluster = plan_for("quickstart", "devcluster", WHOLE)
    component = plan.layout.components[-1]
    assert (component.roles, component.nodes, component.gpus_per_node) == (("env",), 2, 0)
    assert (component.exclusive, component.cpus) == (True, 8)
    assert [node for node, _ in steps(plan)] == list(allocations_for(plan)[2, 0].hosts)
    assert {options for _, options in steps(plan)} == {("--het-group=2",)}
    group = plan.group(Role.ENV)
    assert group.ready == HttpProbe(path="/health")
    assert (group.policy.restart, group.policy.critical, group.policy.max_restarts) == ("on-failure", False, 20)
    assert Role.ENV in plan.group(Role.ORCHESTRATOR).after
    (script,) = [s.text for s in render_jobs(plan, cluster, run_id="0" * 32, command=lambda part: "true", cwd=CWD)]
    assert "gpu:" not in script.split("#SBATCH hetjob")[-1].split("\n\n")[0]


def test_workers_have_parts_of_nodes() -> None:
    plan, cluster = plan_for("quickstart", "devcluster", PARTS)
    assert plan.layout.reason == "workers of environments ask for parts of nodes"
    component = plan.layout.components[-1]
    assert (component.nodes, component.exclusive, component.cpus, component.memory_gib) == (2, False, 4, 1.0)
    first, second = allocations_for(plan)[2, 0].hosts
    assert [node for node, _ in steps(plan)] == [first, first, second]
    assert {options for _, options in steps(plan)} == {("--het-group=2", "--exact", "--cpus-per-task=2", "--mem=512")}
    (script,) = [s.text for s in render_jobs(plan, cluster, run_id="0" * 32, command=lambda part: "true", cwd=CWD)]
    last = script.split("#SBATCH hetjob")[-1].split("\n\n")[0]
    assert "--exclusive" not in last
    assert "#SBATCH --mem=1024M" in last


def test_several_workers_share_whole_nodes() -> None:
    four = "environment_workers={count: 4, per_node: 4}"
    plan, _ = plan_for("quickstart", "devcluster", four, "job.layout=hetjob")
    component = plan.layout.components[-1]
    assert (component.nodes, component.exclusive) == (1, True)
    assert {options[1:] for _, options in steps(plan)} == {("--exact", "--cpus-per-task=2", "--mem=0")}
    # in one allocation with the other roles, whose nodes have GPUs
    plan, _ = plan_for("quickstart", "devcluster", four)
    assert (plan.layout.kind, plan.layout.components[0].nodes) == ("single", 3)
    assert {options for _, options in steps(plan)} == {("--exact", "--cpus-per-task=2", "--mem=0", "--gres=none")}
    assert {node for node, _ in steps(plan)} == {allocations_for(plan)[0, 0].hosts[2]}
    plan, _ = plan_for("quickstart", "devcluster", "environment_workers={count: 1}")
    assert {options for _, options in steps(plan)} == {("--exact", "--cpus-per-task=8", "--mem=0", "--gres=none")}


def test_workers_run_on_the_trainer_node() -> None:
    theirs = "environment_workers={count: 2, placement: trainer_node}"
    plan, _ = plan_for("quickstart", "devcluster", theirs, "job.layout=hetjob")
    assert [component.roles for component in plan.layout.components] == [("trainer",), ("engine",)]
    trainer = allocations_for(plan)[0, 0].hosts[0]
    assert {node for node, _ in steps(plan)} == {trainer}
    assert all("--overlap" in options for _, options in steps(plan))


def test_the_partition_is_that_of_the_role(tmp_path: Path) -> None:
    node = "{gpus: 0, cpus: 64, memory_gib: 250, fabric: {kind: ethernet}, interface: eth7}"
    profile = tmp_path / "withcpu.yaml"
    profile.write_text(
        f"extends: devcluster\npartitions:\n  cpu:\n    nodes: 2\n    node: {node}\n"
        f"python_by_role: {{env: {tmp_path}/python}}\n"
    )
    loaded = load_recipe("quickstart", [WHOLE, "job.partition={env: cpu}"])
    site = for_job(loaded, load_cluster(str(profile)))
    check_rules(loaded, site)
    plan = make_plan(absolute_paths(loaded.value, CWD), site.value, "night-1", Path("/runs/night-1"))
    assert plan.layout.components[-1].partition == "cpu"
    assert plan.group(Role.ENV).env["GLOO_SOCKET_IFNAME"] == "eth7"
    assert environment_role(plan) is Role.ENV
    assert role_python(plan, Role.ENV) == f"{tmp_path}/python"
    assert environment_role(plan_for("quickstart", "devcluster")[0]) is Role.ORCHESTRATOR


def test_an_evaluation_has_workers_before_what_evaluates() -> None:
    plan, _ = plan_for("quickstart", "devcluster", WHOLE, "job.payload=evaluation", "evaluation.sets=[{name: eval}]")
    assert [group.role.value for group in plan.groups] == ["engine", "env", "orchestrator"]
    assert Role.ENV in plan.group(Role.ORCHESTRATOR).after


def test_programs_at_workers_reach_the_gateway() -> None:
    endpoints = Endpoints(urls={"orchestrator": ["http://10.0.0.7:20000"]})
    assert gateway_host(load_recipe("quickstart", [WHOLE]).value, endpoints) == "10.0.0.7"
    assert gateway_host(load_recipe("quickstart", ["orchestrator.gateway=run"]).value, endpoints) == "10.0.0.7"
    assert gateway_host(load_recipe("quickstart").value, endpoints) == "127.0.0.1"


@pytest.mark.parametrize(
    ("settings", "rule", "key"),
    [
        (("environment_workers={count: 2, cpus: 4}",), "workers-shape", "cpus"),
        (("environment_workers={count: 2, per_node: 3}",), "workers-shape", "per_node"),
        (("environment_workers={count: 2, placement: trainer_node, per_node: 2}",), "workers-shape", "per_node"),
        (("environment_workers={count: 2, cpus: 9, memory_gib: 1}",), "workers-fit-node", "cpus"),
        (("environment_workers={count: 2, cpus: 2, memory_gib: 2}",), "workers-fit-node", "memory_gib"),
        (("environment_workers={count: 9, per_node: 9}",), "workers-fit-node", "per_node"),
        ((WHOLE, "job.layout=elastic"), "workers-not-elastic", "placement"),
    ],
)
def test_wrong_settings_are_named(settings: tuple[str, ...], rule: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_rules(load_recipe("quickstart", settings), load_cluster("devcluster"))
    found = [(f.key, f.what.rpartition("[")[2].rstrip("]")) for f in caught.value.findings]
    assert found == [(f"environment_workers.{key}", rule)]


def test_workers_of_an_elastic_run_stay_on_the_trainers_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    beside = "environment_workers={count: 3, placement: trainer_node}"
    plan, _ = plan_for("quickstart", "devcluster", beside, "job.layout=elastic", "engine.replicas=2")
    assert [component.roles for component in plan.layout.components] == [("trainer",), ("engine",)]
    group = plan.group(Role.ENV)
    assert (group.replicas, group.component, group.beside) == (3, 0, True)
    assert not plan.own_jobs(group)
    assert plan.own_jobs(plan.group(Role.ENGINE))
    run = RunDir(tmp_path)
    monkeypatch.setattr(RunDir, "plan", lambda self: plan)
    assert scale._parse(["engine=4"], run) == {"engine": 4}
    with pytest.raises(UsageError, match="stay as many as they are"):
        scale._parse(["engine=4", "env=5"], run)


def test_too_many_workers_do_not_fit_the_partition() -> None:
    recipe = load_recipe("quickstart", ["environment_workers={count: 60, per_node: 2}"])
    with pytest.raises(ConfigError, match="environment_workers 30"):
        check_rules(recipe, load_cluster("devcluster"))


def test_memory_of_environments_is_that_of_the_workers_nodes() -> None:
    cluster, facts = load_cluster("h200-28").value, load_facts("GLM-5")
    plain = memory_report(load_recipe("glm5_swe").value, cluster, facts)
    workers = "environment_workers={count: 4, per_node: 2, cpus: 8, memory_gib: 16}"
    recipe = load_recipe("glm5_swe", [workers]).value
    moved = memory_report(recipe, cluster, facts)
    here, there = plain.place(Role.TRAINER, "host").ledger, moved.place(Role.TRAINER, "host").ledger
    assert there.total == here.total - here["environments"].value
    place = moved.place(Role.ENV, "host")
    assert place.capacity == 32 * GIB
    # half of the rollouts in flight, two workers with a process for each environment
    assert place.ledger["environments"].value == here["environments"].value // 2
    assert place.ledger["environment workers"].value == 2 * (1 + len(recipe.environments)) * (128 << 20)
