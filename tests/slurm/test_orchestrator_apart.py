"""An orchestrator on a node of its own, in a partition without GPUs: where recipe or profile place it there."""

from __future__ import annotations

from pathlib import Path

import pytest
from plans import CWD, allocations_for

from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.joined import for_job
from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.config.plan import Plan, Role
from hpcrl.config.rules.table import check_rules
from hpcrl.errors import ConfigError
from hpcrl.jobplan import absolute_paths, make_plan
from hpcrl.slurm.launch_arguments import launch_replica
from hpcrl.slurm.render import render_jobs

PROFILE = """\
extends: devcluster
partitions:
  cpu:
    nodes: 2
    max_time_h: 24
    node: {gpus: 0, cpus: 64, memory_gib: 250, fabric: {kind: ethernet}, interface: eth7}
"""
APART = "job.partition={orchestrator: cpu}"


@pytest.fixture
def profile(tmp_path: Path) -> str:
    """The profile of a site with a partition of nodes without GPUs."""
    path = tmp_path / "withcpu.yaml"
    path.write_text(PROFILE)
    return str(path)


def planned(profile: str, *settings: str) -> tuple[Plan, SlurmCluster]:
    loaded = load_recipe("quickstart", settings)
    site = for_job(loaded, load_cluster(profile))
    check_rules(loaded, site)
    assert isinstance(site.value, SlurmCluster)
    return make_plan(absolute_paths(loaded.value, CWD), site.value, "night-1", Path("/runs/night-1")), site.value


def test_it_is_a_component_of_its_own(profile: str) -> None:
    plan, cluster = planned(profile, APART)
    assert (plan.layout.kind, plan.layout.reason) == ("hetjob", "roles have different partitions")
    component = plan.layout.components[-1]
    assert (component.roles, component.partition, component.nodes) == (("orchestrator",), "cpu", 1)
    assert component.gpus_per_node == 0
    group = plan.group(Role.ORCHESTRATOR)
    assert not group.beside
    # its network is that of its own node
    assert group.env["GLOO_SOCKET_IFNAME"] == "eth7"
    assert plan.group(Role.TRAINER).env["GLOO_SOCKET_IFNAME"] == "lo"
    (script,) = [
        script.text for script in render_jobs(plan, cluster, run_id="0" * 32, command=lambda part: "true", cwd=CWD)
    ]
    last = script.split("#SBATCH hetjob")[-1]
    assert "#SBATCH --partition=cpu" in last
    assert "gpu" not in last.split("\n\n")[0].replace("--partition=gpu", "")


def test_its_step_has_the_node_and_asks_for_no_gpus(profile: str) -> None:
    plan, _ = planned(profile, APART)
    allocations = allocations_for(plan)
    launch = launch_replica(plan, plan.group(Role.ORCHESTRATOR), 0, command=["true"], cwd=CWD, allocations=allocations)
    index = len(plan.layout.components) - 1
    assert launch.hosts == allocations[index, 0].hosts
    assert f"--het-group={index}" in launch.argv
    assert not [word for word in launch.argv if word.startswith(("--overlap", "--gres", "--gpus"))]


def test_the_orchestrator_runs_on_the_trainer_node_by_default(profile: str) -> None:
    for settings in ((), ("job.partition={orchestrator: gpu}",)):
        plan, _ = planned(profile, *settings)
        assert plan.group(Role.ORCHESTRATOR).beside
        assert {name for component in plan.layout.components for name in component.roles} == {"trainer", "engine"}


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        (("job.layout=elastic",), "the orchestrator has no job of its own"),
        (("job.layout=single",), "orchestrator in cpu"),
        (("job.time_limit_h=24.5",), "24"),
        (("job.partition={orchestrator: cpus}",), "is not a partition of"),
        (("job.partition={router: cpu}",), "roles that have are"),
    ],
)
def test_what_cannot_be_is_reported(profile: str, settings: tuple[str, ...], what: str) -> None:
    with pytest.raises(ConfigError) as error:
        planned(profile, APART, *settings)
    assert what in str(error.value)
