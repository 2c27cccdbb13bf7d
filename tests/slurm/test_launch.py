"""One function for every layout: what a replica is started with."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from plans import APPTAINER, CWD, PYXIS, allocations_for, plan_for
from srun_stand_in import write_srun

from hpcrl.config.cluster import ClusterProfile, SlurmCluster
from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.config.plan import Plan, Role
from hpcrl.errors import HpcrlError
from hpcrl.jobplan import make_plan
from hpcrl.slurm.client import SlurmClient
from hpcrl.slurm.command import CommandResult
from hpcrl.slurm.launch_arguments import (
    Allocation,
    Launch,
    allocations_from_env,
    launch_replica,
    outside_environment,
    step_environment,
)
from hpcrl.supervisor.launch.step_launcher import StepLauncher

TWO_BY_TWO = ("trainer.ranks=2", "trainer.nodes=2", "engine.replicas=2")


def start(plan: Plan, role: Role, replica: int = 0) -> Launch:
    return launch_replica(
        plan,
        plan.group(role),
        replica,
        command=["run", "it's"],
        cwd=CWD,
        allocations=allocations_for(plan),
    )


def options(launch: Launch) -> dict[str, str]:
    """Options of srun by name, up to the command."""
    assert launch.argv[0] == "srun"
    pairs = [word.partition("=") for word in launch.argv[1:] if word.startswith("--")]
    assert len({name for name, _, _ in pairs}) == len(pairs), "an option appears twice"
    return {name: value for name, _, value in pairs}


def test_local_is_the_command_itself() -> None:
    plan = make_plan(load_recipe("quickstart").value, load_cluster("local").value, "r", Path("/r"))
    launch = launch_replica(plan, plan.group(Role.ENGINE), 0, command=["a", "b c"], cwd=CWD)
    assert launch == Launch(("a", "b c"), (), 1)


@pytest.mark.parametrize(
    ("layout", "role", "replica", "which", "hosts"),
    [
        ("hetjob", Role.TRAINER, 0, ("--het-group", "0"), "n001,n002"),
        ("hetjob", Role.ENGINE, 0, ("--het-group", "1"), "n003"),
        ("hetjob", Role.ENGINE, 1, ("--het-group", "1"), "n004"),
        ("hetjob", Role.ORCHESTRATOR, 0, ("--het-group", "0"), "n001"),
        ("single", Role.TRAINER, 0, None, "n001,n002"),
        ("single", Role.ENGINE, 0, None, "n003"),
        ("single", Role.ENGINE, 1, None, "n004"),
        ("single", Role.ORCHESTRATOR, 0, None, "n001"),
        ("elastic", Role.TRAINER, 0, None, "n001,n002"),
        ("elastic", Role.ENGINE, 0, ("--jobid", "7010"), "n003"),
        ("elastic", Role.ENGINE, 1, ("--jobid", "7011"), "n004"),
        ("elastic", Role.ORCHESTRATOR, 0, None, "n001"),
    ],
)
def test_layouts_differ_in_which_job_only(
    layout: str, role: Role, replica: int, which: tuple[str, str] | None, hosts: str
) -> None:
    plan, _ = plan_for("quickstart", "devcluster", *TWO_BY_TWO, f"job.layout={layout}")
    launch = start(plan, role, replica)
    found = options(launch)
    assert {name: found.get(name) for name in ("--het-group", "--jobid")} == {
        "--het-group": None,
        "--jobid": None,
        **(dict([which]) if which else {}),
    }
    assert found["--nodelist"] == hosts
    assert launch.hosts == tuple(hosts.split(","))
    assert launch.tasks == int(found["--ntasks"]) == int(found["--nodes"]) == len(launch.hosts)
    assert found["--job-name"] == f"{role.value}-{replica}"
    # always: one failed rank ends its replica, the environment reaches the tasks, nobody waits for PMI
    assert (found["--kill-on-bad-exit"], found["--export"], found["--mpi"]) == ("1", "ALL", "none")
    assert launch.argv[-2:] == ("run", "it's")


@pytest.mark.parametrize(
    ("gres", "gpu_type", "own", "beside"),
    [
        ("gres", "h200", "--gres=gpu:h200:8", "--gres=none"),
        ("gres", None, "--gres=gpu:8", "--gres=none"),
        ("gpus_per_node", "h200", "--gpus-per-node=h200:8", "--gres=none"),
        ("gpus_per_node", None, "--gpus-per-node=8", "--gres=none"),
        ("none", "h200", None, None),
    ],
)
def test_gpus(gres: str, gpu_type: str | None, own: str | None, beside: str | None) -> None:
    _, site = plan_for("quickstart", "devcluster")
    partitions = site.model_dump()["partitions"]
    partitions["gpu"]["node"]["gpu_type"] = gpu_type
    plan, _ = plan_for("quickstart", "devcluster", gres=gres, partitions=partitions)

    def gpu_options(role: Role) -> list[str]:
        return [word for word in start(plan, role).argv if word.startswith(("--gres", "--gpus"))]

    assert gpu_options(Role.TRAINER) == gpu_options(Role.ENGINE) == ([own] if own else [])
    assert gpu_options(Role.ORCHESTRATOR) == ([beside] if beside else [])


def test_only_steps_of_the_same_nodes_overlap() -> None:
    plan, _ = plan_for("quickstart", "devcluster")
    assert "--overlap" in start(plan, Role.ORCHESTRATOR).argv
    # a restarted engine waits until the memory of the one before is free
    assert "--overlap" not in start(plan, Role.ENGINE).argv
    assert "--overlap" not in start(plan, Role.TRAINER).argv


SHARED = ("qwen3_30b_a3b_node", "h200-28", "engine.replicas=2")


def test_on_a_shared_node_steps_have_parts_of_it() -> None:
    plan, _ = plan_for(*SHARED)
    started = [start(plan, Role.TRAINER), start(plan, Role.ENGINE, 0), start(plan, Role.ENGINE, 1)]
    assert {launch.hosts for launch in started} == {("n001",)}
    found = [options(launch) for launch in started]
    assert [each["--gres"] for each in found] == ["gpu:h200:4", "gpu:h200:2", "gpu:h200:2"]
    # an eighth of the CPUs is for what runs beside, and memory is nobody's alone
    assert [int(each["--cpus-per-task"]) for each in found] == [80, 40, 40]
    assert {each["--mem"] for each in found} == {"0"}
    # of what another one has, nothing: a restarted engine waits for its own part
    assert all("--exact" in each and "--overlap" not in each for each in found)
    assert "--overlap" in start(plan, Role.ORCHESTRATOR).argv
    assert (plan.layout.nodes, plan.layout.gpus, plan.layout.kind) == (1, 8, "single")


def test_on_a_shared_node_probes_have_the_part_of_their_role() -> None:
    plan, _ = plan_for(*SHARED, "job.payload=probe")
    found = options(start(plan, Role.TRAINER))
    assert (found["--ntasks"], found["--cpus-per-task"], found["--gres"]) == ("1", "80", "gpu:h200:4")


def test_without_gpus_from_slurm_roles_get_their_devices() -> None:
    plan, _ = plan_for(*SHARED, gres="none")
    roles = [(Role.TRAINER, 0), (Role.ENGINE, 0), (Role.ENGINE, 1)]
    told = [start(plan, role, replica).argv[-4:-2] for role, replica in roles]
    assert told == [("env", f"CUDA_VISIBLE_DEVICES={gpus}") for gpus in ("0,1,2,3", "4,5", "6,7")]
    assert not any("CUDA_VISIBLE_DEVICES" in word for word in start(plan, Role.ORCHESTRATOR).argv)
    whole, _ = plan_for("qwen3_30b_a3b", "h200-28", gres="none")
    assert not any("CUDA_VISIBLE_DEVICES" in word for word in start(whole, Role.ENGINE).argv)


@pytest.mark.parametrize("gres", ["gres", "none"])
def test_on_the_same_gpus_steps_overlap_and_see_their_own(gres: str) -> None:
    settings = ("engine.placement=shared_gpus", "trainer.ranks=4")
    plan, _ = plan_for(*SHARED, *settings, gres=gres)
    started = [start(plan, Role.TRAINER), start(plan, Role.ENGINE, 0), start(plan, Role.ENGINE, 1)]
    for launch in started:
        assert {"--overlap"} <= set(launch.argv)
        # with a part of the CPUs alone Slurm would give both steps the same ones
        assert not {"--exact", "--cpus-per-task"} & set(options(launch))
        assert options(launch).get("--gres") == (None if gres == "none" else "gpu:h200:8")
    told = [launch.argv[-4:-2] for launch in started]
    assert told == [("env", f"CUDA_VISIBLE_DEVICES={gpus}") for gpus in ("0,1,2,3", "0,1", "2,3")]
    assert plan.group(Role.TRAINER).after == (Role.ENGINE,)
    assert plan_for(*SHARED)[0].group(Role.TRAINER).after == ()
    assert plan.group(Role.ENGINE).share is not None
    assert plan.group(Role.ENGINE).share.text == "2 shared GPUs and 192 shared CPUs"  # type: ignore[union-attr]


def test_engines_without_gpus_have_cpus_of_a_shared_node() -> None:
    shape = ("trainer.ranks=2", "engine.replicas=2", "engine.placement=shared_node")
    plan, _ = plan_for("quickstart", "devcluster", *shape, container=APPTAINER)
    trainer, engine = start(plan, Role.TRAINER), start(plan, Role.ENGINE)
    assert "--gres=gpu:h200:2" in trainer.argv
    assert "--gres=none" in engine.argv
    assert ("--nv" in trainer.argv, "--nv" in engine.argv) == (True, False)


def test_reference_run_takes_every_node_once() -> None:
    plan, _ = plan_for("glm5_swe", "h200-28", "job.payload=probe")
    launches = [start(plan, g.role, r) for g in plan.groups if not g.beside for r in range(g.replicas)]
    hosts = [host for launch in launches for host in launch.hosts]
    assert sorted(hosts) == [f"n{i:03d}" for i in range(1, 29)]
    assert sum(launch.tasks for launch in launches) == plan.layout.nodes == 28
    assert plan.processes - 2 == plan.layout.gpus == 224
    # the ranks of a node are started as those of a trainer are
    assert {options(launch)["--ntasks-per-node"] for launch in launches} == {"1"}
    trainer = plan.group(Role.TRAINER).command
    assert trainer[trainer.index("--ranks") + 1 :][:1] == ("8",)
    assert trainer[-3:] == ("--imports", "hpcrl.runs.probe", "hpcrl.runs.probe")


def test_the_launcher_of_ranks_is_one_task_a_node() -> None:
    plan, _ = plan_for("quickstart", "devcluster", "trainer.ranks=4", "trainer.nodes=2")
    command = plan.group(Role.TRAINER).command
    assert command[command.index("--nodes") + 1] == "2"
    assert command[command.index("--node-rank") + 1] == "{node_rank}"
    assert command[command.index("--ranks") + 1] == "2"
    assert options(start(plan, Role.TRAINER))["--ntasks-per-node"] == "1"


def test_probes_of_one_rank_a_node_are_numbered_by_their_launchers() -> None:
    plan, _ = plan_for("quickstart", "devcluster", *TWO_BY_TWO, "job.payload=probe")
    command = plan.group(Role.TRAINER).command
    assert command[command.index("--node-rank") + 1] == "{node_rank}"
    assert plan.group(Role.ENGINE).command == ("{python}", "-P", "-m", "hpcrl.runs.probe")


def test_one_rank_has_no_launcher_above_it() -> None:
    plan, _ = plan_for("quickstart", "devcluster", "trainer.ranks=1")
    assert plan.group(Role.TRAINER).command == ("{python}", "-u", "-P", "-m", "hpcrl.trainer")


def test_pyxis() -> None:
    plan, _ = plan_for("quickstart", "devcluster", container=PYXIS)
    found = options(start(plan, Role.ENGINE))
    assert found["--container-image"] == "/images/hpcrl.sqsh"
    mounts = found["--container-mounts"].split(",")
    assert {"/runs:/runs", "/data:/data:ro", f"{CWD}:{CWD}"} < set(mounts)
    assert found["--container-workdir"] == str(CWD)
    assert "--no-container-mount-home" in found
    assert "OMP_NUM_THREADS" in found["--container-env"].split(",")
    assert start(plan, Role.ENGINE).argv[-2:] == ("run", "it's")


def test_apptainer() -> None:
    plan, _ = plan_for("quickstart", "devcluster", container=APPTAINER)
    argv = start(plan, Role.ENGINE).argv
    inner = argv[argv.index("apptainer") :]
    assert inner[:3] == ("apptainer", "exec", "--nv")
    assert ("--bind", "/data:/data:ro") in itertools.pairwise(inner)
    assert "--no-home" not in inner
    assert inner[-5:] == ("--pwd", str(CWD), "/images/hpcrl.sif", "run", "it's")
    # no GPU for what runs beside
    assert "--nv" not in start(plan, Role.ORCHESTRATOR).argv
    assert plan.python == "python3"
    without = plan_for("quickstart", "devcluster", container={**APPTAINER, "mount_home": False})[0]
    argv = start(without, Role.ENGINE).argv
    # a word of apptainer's, not of the command in the container
    assert "--no-home" in argv[argv.index("exec") : argv.index("/images/hpcrl.sif")]


def test_nodes_that_are_not_there() -> None:
    plan, _ = plan_for("quickstart", "devcluster", "engine.replicas=2", "job.layout=elastic")
    group, nodes = plan.group(Role.ENGINE), allocations_for(plan)
    del nodes[1, 1]
    with pytest.raises(HpcrlError, match="engine 1 has no nodes: job 1 of component 1 is not running"):
        launch_replica(plan, group, 1, command=["x"], cwd=CWD, allocations=nodes)
    plan, _ = plan_for("quickstart", "devcluster", "engine.replicas=2", "job.layout=single")
    short = {(0, 0): Allocation(("n1", "n2"))}
    with pytest.raises(HpcrlError, match="needs nodes 2 to 2 of component 0, which has 2"):
        launch_replica(plan, plan.group(Role.ENGINE), 1, command=["x"], cwd=CWD, allocations=short)


def test_a_heterogeneous_job_of_one_component_has_no_groups() -> None:
    """Slurm numbers the variables of components only where there are several."""
    plan, _ = plan_for("quickstart", "devcluster", *TWO_BY_TWO, "job.layout=hetjob")
    one = plan.model_copy(update={"layout": plan.layout.model_copy(update={"components": plan.layout.components[:1]})})
    found = allocations_from_env(one, {"SLURM_JOB_NODELIST": "n[001-002]"})
    assert found == {(0, 0): Allocation(("n001", "n002"))}


def test_allocations_from_the_batch_environment() -> None:
    plan, _ = plan_for("quickstart", "devcluster", *TWO_BY_TWO, "job.layout=hetjob")
    environ = {"SLURM_JOB_NODELIST_HET_GROUP_0": "n[001-002]", "SLURM_JOB_NODELIST_HET_GROUP_1": "n[003-004]"}
    assert allocations_from_env(plan, environ) == allocations_for(plan)
    with pytest.raises(HpcrlError, match="HET_GROUP_1 is not set"):
        allocations_from_env(plan, {"SLURM_JOB_NODELIST_HET_GROUP_0": "n[001-002]"})
    with pytest.raises(HpcrlError, match="has 1 nodes, the plan 2"):
        allocations_from_env(plan, {**environ, "SLURM_JOB_NODELIST_HET_GROUP_1": "n3"})
    for layout, nodes in (("single", "n[001-004]"), ("elastic", "n[001-002]")):
        plan, _ = plan_for("quickstart", "devcluster", *TWO_BY_TWO, f"job.layout={layout}")
        assert allocations_from_env(plan, {"SLURM_JOB_NODELIST": nodes})[0, 0] == allocations_for(plan)[0, 0]


def test_options_of_the_job_do_not_leak_into_steps() -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURM_GPUS_PER_NODE": "8", "SLURM_EXPORT_ENV": "NONE", "SRUN_CPUS_PER_TASK": "4"}
    environ |= {"SLURM_CONF": "/etc/slurm.conf", "HOME": "/h", "SLURM_JOB_NODELIST_HET_GROUP_0": "a"}
    kept = {"SLURM_JOB_ID", "SLURM_CONF", "HOME", "SLURM_JOB_NODELIST_HET_GROUP_0"}
    assert set(step_environment(environ)) == kept


def test_steps_inherit_what_describes_their_allocation_and_nothing_that_srun_reads() -> None:
    """Input variables of srun(1), 22.05 to 25.11, and some that no version knows: a list of what is kept, not of what
    is not."""
    inputs = [
        "ACCOUNT",
        "ACCTG_FREQ",
        "BCAST",
        "BCAST_EXCLUDE",
        "BURST_BUFFER",
        "CLUSTERS",
        "COMPRESS",
        "CONSTRAINT",
        "CORE_SPEC",
        "CPU_BIND",
        "CPU_FREQ_REQ",
        "CPUS_PER_GPU",
        "DEBUG",
        "DELAY_BOOT",
        "DEPENDENCY",
        "DISABLE_STATUS",
        "DIST_PLANESIZE",
        "DISTRIBUTION",
        "EPILOG",
        "EXACT",
        "EXCLUSIVE",
        "EXIT_ERROR",
        "EXIT_IMMEDIATE",
        "EXPORT_ENV",
        "GPU_BIND",
        "GPU_FREQ",
        "GPUS",
        "GPUS_PER_NODE",
        "GPUS_PER_TASK",
        "GRES",
        "GRES_FLAGS",
        "HINT",
        "HOSTFILE",
        "IMMEDIATE",
        "JOB_NAME",
        "KILL_BAD_EXIT",
        "LABELIO",
        "MEM_BIND",
        "MEM_PER_CPU",
        "MEM_PER_GPU",
        "MEM_PER_NODE",
        "MPI_TYPE",
        "MULTI_PROG",
        "NCORES_PER_SOCKET",
        "NETWORK",
        "NNODES",
        "NO_KILL",
        "NPROCS",
        "NTASKS",
        "NTASKS_PER_CORE",
        "NTASKS_PER_NODE",
        "NTASKS_PER_SOCKET",
        "NTASKS_PER_TRES",
        "OPEN_MODE",
        "OVERCOMMIT",
        "OVERLAP",
        "PARTITION",
        "POWER",
        "PROFILE",
        "PROLOG",
        "QOS",
        "REMOTE_CWD",
        "REQ_SWITCH",
        "RESERVATION",
        "RESV_PORTS",
        "SEND_LIBS",
        "SIGNAL",
        "SPREAD_JOB",
        "SRUN_MULTI",
        "STDERRMODE",
        "STDINMODE",
        "STDOUTMODE",
        "STEP_GRES",
        "TASK_EPILOG",
        "TASK_PROLOG",
        "TEST_EXEC",
        "THREAD_SPEC",
        "THREADS_PER_CORE",
        "TIMELIMIT",
        "TRES_PER_TASK",
        "UMASK",
        "UNBUFFEREDIO",
        "USE_MIN_NODES",
        "WAIT",
        "WAIT4SWITCH",
        "WCKEY",
        "WHOLE",
        "WORKING_DIR",
        "OF_A_LATER_VERSION",
    ]
    names = [f"SLURM_{name}" for name in inputs]
    names += ["SRUN_CPUS_PER_TASK", "SRUN_CONTAINER", "SLURMD_DEBUG", "SBATCH_ACCOUNT", "PMI_RANK", "PMIX_RANK"]
    assert step_environment(dict.fromkeys(names, "1")) == {}
    described = [
        "JOB_ID",
        "JOBID",
        "JOB_NODELIST",
        "JOB_NUM_NODES",
        "JOB_CPUS_PER_NODE",
        "JOB_PARTITION",
        "JOB_NODELIST_HET_GROUP_1",
        "JOB_GPUS",
        "HET_SIZE",
        "JOB_ID_HET_GROUP_0",
        "CONF",
        "CLUSTER_NAME",
        "NODELIST",
        "RESTART_COUNT",
        "SUBMIT_DIR",
        "JOB_END_TIME",
    ]
    kept = {**{f"SLURM_{name}": "1" for name in described}, "SLURMD_NODENAME": "n1", "HOME": "/h", "SPANK_X": "1"}
    assert step_environment({**kept, **dict.fromkeys(names, "1")}) == kept


def test_nothing_of_our_job_goes_into_another() -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a", "SLURMD_NODENAME": "a", "SLURM_NTASKS": "4"}
    kept = {"SLURM_CONF": "/etc/slurm.conf", "HOME": "/h"}
    assert outside_environment({**environ, **kept}) == kept


def with_interface(site: ClusterProfile, interface: str | None) -> SlurmCluster:
    """The site, where nodes are reached by another interface."""
    assert isinstance(site, SlurmCluster)
    (name, partition), *_ = site.partitions.items()
    node = partition.node.model_copy(update={"interface": interface})
    return site.model_copy(update={"partitions": {name: partition.model_copy(update={"node": node})}})


class CountingClient(SlurmClient):
    """Knows a site of many nodes, and what it was asked."""

    def __init__(self) -> None:
        super().__init__(run=self.answer)
        self.asked: list[list[str]] = []

    def answer(self, argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float) -> CommandResult:
        self.asked.append(list(argv))
        names = argv[4].split(",") if len(argv) > 4 else [f"n{i:03d}" for i in range(1, 1001)]
        lines = [f"NodeName={name} NodeAddr=10.1.0.{int(name[1:])} State=IDLE" for name in names]
        return CommandResult(0, "\n".join(lines), "")


def test_only_nodes_of_the_job_are_asked_about(tmp_path: Path) -> None:
    """A placement asks once, and about its own nodes: not about the whole site, and not again in a later attempt."""
    plan, site = plan_for("quickstart", "devcluster", "engine.replicas=2", "job.layout=single")
    client = CountingClient()
    site = with_interface(site, None)
    path = write_srun(tmp_path, {f"n00{i}": f"10.1.0.{i}" for i in (7, 8, 9)})
    environ = {"SLURM_JOB_NODELIST": "n[007-009]", "PATH": path}
    launcher = StepLauncher(site, environ=environ, client=client)
    placed = launcher.place(plan)
    assert placed[Role.ENGINE, 1].host == "10.1.0.9"
    assert client.asked == [["scontrol", "--oneliner", "show", "node", "n007,n008,n009"]]
    launcher.place(plan)
    assert len(client.asked) == 1
    assert launcher.failed_nodes() == []
    assert client.asked[1:] == [["scontrol", "--oneliner", "show", "node", "n007,n008,n009"]]


def test_replicas_listen_on_the_interface_of_the_profile_not_on_slurms_address(tmp_path: Path) -> None:
    plan, site = plan_for("quickstart", "devcluster", "engine.replicas=2", "job.layout=single")
    path = write_srun(tmp_path, {f"n00{i}": f"10.9.0.{i}" for i in (7, 8, 9)}, ahead_s={"n008": 3.1, "n009": -40.0})
    environ = {"SLURM_JOB_NODELIST": "n[007-009]", "PATH": path}
    launcher = StepLauncher(with_interface(site, "net0"), environ=environ, client=CountingClient())
    placed = launcher.place(plan)
    assert [placed[role].host for role in ((Role.TRAINER, 0), (Role.ENGINE, 0), (Role.ENGINE, 1))] == [
        "10.9.0.7",
        "10.9.0.8",
        "10.9.0.9",
    ]
    # half of a round trip is what is not known of a clock
    for node, ahead_s in (("n007", 0.0), ("n008", 3.1), ("n009", -40.0)):
        clock = launcher.clocks.nodes[node]
        assert abs(clock.ahead_s - ahead_s) <= clock.uncertain_s < 3.0, node
    with pytest.raises(HpcrlError, match="node n007 has no network interface bond0"):
        StepLauncher(with_interface(site, "bond0"), environ=environ, client=CountingClient()).place(plan)


def test_a_plan_of_an_earlier_run_is_read() -> None:
    """It says how many tasks Slurm starts on each node, which is always one."""
    plan, _ = plan_for("quickstart", "devcluster")
    written = json.loads(plan.model_dump_json())
    for group in written["groups"]:
        group["tasks_per_node"] = 1
    assert Plan.model_validate_json(json.dumps(written)) == plan
