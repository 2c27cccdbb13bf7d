"""Steps beside those of roles: a task of our own on each node of an allocation, and a person's shell."""

from __future__ import annotations

import pytest
from plans import APPTAINER, PYXIS, allocations_for, plan_for

from hpcrl.config.plan import Role
from hpcrl.slurm.launch_arguments import Allocation, launch_on_nodes, launch_shell


@pytest.mark.parametrize(
    ("layout", "component", "which"),
    [
        ("single", 0, []),
        ("hetjob", 0, ["--het-group=0"]),
        ("hetjob", 1, ["--het-group=1"]),
        ("elastic", 0, []),
        ("elastic", 1, ["--jobid=7010"]),
    ],
)
def test_one_task_runs_on_each_node_in_addition_to_others(layout: str, component: int, which: list[str]) -> None:
    plan, _ = plan_for("quickstart", "devcluster", f"job.layout={layout}", "engine.replicas=2")
    allocation = allocations_for(plan)[component, 0]
    launch = launch_on_nodes(plan, component, allocation, command=["look", "around"])
    count = len(allocation.hosts)
    assert (launch.hosts, launch.tasks) == (allocation.hosts, count)
    assert list(launch.argv) == [
        "srun",
        *which,
        "--job-name=nodes",
        f"--nodes={count}",
        f"--nodelist={','.join(allocation.hosts)}",
        f"--ntasks={count}",
        "--ntasks-per-node=1",
        "--overlap",
        "--gres=none",
        "--cpu-bind=none",
        "--mpi=none",
        "--kill-on-bad-exit=1",
        "--wait=0",
        "--export=ALL",
        "look",
        "around",
    ]


def test_where_slurm_knows_no_gpus_none_are_declined() -> None:
    plan, _ = plan_for("quickstart", "devcluster", gres="none")
    launch = launch_on_nodes(plan, 0, Allocation(("n1", "n2")), command=["look"])
    assert not [word for word in launch.argv if word.startswith("--gres")]
    assert "--overlap" in launch.argv


def test_a_task_of_our_own_runs_on_the_node_itself() -> None:
    plan, _ = plan_for("quickstart", "devcluster", container=APPTAINER)
    assert plan.container is not None
    assert launch_on_nodes(plan, 0, Allocation(("n1", "n2")), command=["look"]).argv[-1:] == ("look",)
    assert "apptainer" not in launch_on_nodes(plan, 0, Allocation(("n1", "n2")), command=["look"]).argv


@pytest.mark.parametrize(
    ("role", "het_group", "which", "gpus", "how"),
    [
        (Role.ENGINE, None, [], [], "--pty"),
        (Role.ENGINE, 1, ["--het-group=1"], [], "--unbuffered"),
        (Role.TRAINER, 0, ["--het-group=0"], [], "--pty"),
        # what runs beside others has no GPUs, and its shell sees none
        (Role.ORCHESTRATOR, None, [], ["--gres=none"], "--pty"),
    ],
)
def test_a_shell_sees_what_its_role_sees(
    role: Role, het_group: int | None, which: list[str], gpus: list[str], how: str
) -> None:
    plan, _ = plan_for("quickstart", "devcluster")
    ask = {"job_id": 93, "het_group": het_group, "node": "n2", "command": ["bash", "-l"]}
    argv = launch_shell(plan, plan.group(role), **ask, terminal=how == "--pty")  # type: ignore[arg-type]
    assert list(argv) == [
        "srun",
        "--jobid=93",
        *which,
        "--job-name=shell",
        "--nodes=1",
        "--nodelist=n2",
        "--ntasks=1",
        "--overlap",
        *gpus,
        "--cpu-bind=none",
        "--mpi=none",
        how,
        "--export=ALL",
        f"--chdir={plan.run_dir}",
        "bash",
        "-l",
    ]


@pytest.mark.parametrize(
    ("container", "sign"), [(APPTAINER, "apptainer"), (PYXIS, "--container-image=/images/hpcrl.sqsh")]
)
def test_a_shell_for_a_container_is_in_one_of_the_same_image(container: dict[str, object], sign: str) -> None:
    plan, _ = plan_for("quickstart", "devcluster", container=container)
    argv = launch_shell(plan, plan.group(Role.ENGINE), job_id=93, node="n2", command=["bash"], terminal=True)
    assert sign in argv
    assert argv[-1] == "bash"
