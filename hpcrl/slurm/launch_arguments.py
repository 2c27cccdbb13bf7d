"""One function turns a replica into launch arguments: the only place that knows the layout's form of ``srun``.

Above it nothing differs between a het group, a slice of one allocation, a job of its own and a local process.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcrl.config.layout import Container, JobComponent
from hpcrl.config.mounts import check_working_directory
from hpcrl.config.plan import Plan, RoleGroup
from hpcrl.errors import HpcrlError
from hpcrl.slurm.command import CLUSTER_VARIABLES
from hpcrl.slurm.hostlist import expand_hostlist

__all__ = [
    "Allocation",
    "Allocations",
    "Launch",
    "allocations_from_env",
    "gpu_options",
    "launch_on_nodes",
    "launch_replica",
    "launch_shell",
    "outside_environment",
    "step_environment",
]


@dataclass(frozen=True)
class Allocation:
    """The nodes of one job of a component.

    Attributes
    ----------
    hosts:
        Node names in Slurm's order. Slurm numbers the tasks of a step in this order whatever ``--nodelist`` says;
        replicas take neighbouring nodes, so that theirs is the same.
    job_id:
        Set where it is another job than the one that launches.
    """

    hosts: tuple[str, ...]
    job_id: str | None = None


Allocations = Mapping[tuple[int, int], Allocation]
"""By component and by job of the component."""


@dataclass(frozen=True)
class Launch:
    """How a replica is started.

    Attributes
    ----------
    argv:
        The whole command line.
    hosts:
        Its nodes; the first is where it listens. Empty for a local process.
    tasks:
        Processes that the command line starts.
    """

    argv: tuple[str, ...]
    hosts: tuple[str, ...]
    tasks: int


_ALLOCATION = frozenset(
    {
        "SLURMD_NODENAME",
        "SLURM_ARRAY_JOB_ID",
        "SLURM_ARRAY_TASK_ID",
        "SLURM_CLUSTER_NAME",
        "SLURM_CONF",
        "SLURM_CONF_SERVER",
        "SLURM_CPUS_ON_NODE",
        "SLURM_HET_SIZE",
        "SLURM_JOBID",
        "SLURM_JWT",
        "SLURM_LOCALID",
        "SLURM_NODEID",
        "SLURM_NODELIST",
        "SLURM_NODE_ALIASES",
        "SLURM_PROCID",
        "SLURM_RESTART_COUNT",
        "SLURM_SUBMIT_DIR",
        "SLURM_SUBMIT_HOST",
        "SLURM_TASKS_PER_NODE",
        "SLURM_TASK_PID",
        "SLURM_WORKING_CLUSTER",
    }
)
"""Variables of Slurm that describe the allocation that a process is in, and its cluster, with all of ``SLURM_JOB_*``.

``srun`` reads dozens of others as options of its steps, and every version some more: what a shell, a site or ``sbatch``
has set of those would change a step behind our back.
"""
_OPTIONS_OF_STEPS = frozenset({"SLURM_JOB_NAME"})
"""Of ``SLURM_JOB_*`` what is an option all the same."""
_SLURMS = ("SLURM_", "SLURMD_", "SLURMSTEPD_", "SRUN_", "SBATCH_", "SALLOC_", "PMI_", "PMI2_", "PMIX_")
_OF_COMPONENT = re.compile(r"_(?:HET|PACK)_GROUP_\d+$")
"""What a variable of one component of a heterogeneous job ends with."""


def step_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for ``srun``: of Slurm's own variables only those that describe the allocation."""
    return {name: value for name, value in environ.items() if not name.startswith(_SLURMS) or _describes(name)}


def _describes(name: str) -> bool:
    name = _OF_COMPONENT.sub("", name)
    return name in _ALLOCATION or (name.startswith("SLURM_JOB_") and name not in _OPTIONS_OF_STEPS)


def outside_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for ``srun --jobid`` into another job: nothing of Slurm's that is about the job we are in.

    Without this the step gets that job's node list and counts where its own should be (seen on 22.05).
    """
    return {
        name: value
        for name, value in step_environment(environ).items()
        if name in CLUSTER_VARIABLES or not name.startswith(_SLURMS)
    }


def allocations_from_env(
    plan: Plan, environ: Mapping[str, str], *, spare: bool = False
) -> dict[tuple[int, int], Allocation]:
    """The allocations that the batch script's environment names.

    For the layout ``elastic`` that is the job we are in, as component 0; engines' jobs are found by their ids.

    Parameters
    ----------
    spare:
        More nodes than the plan has are no error: the first of them are taken.

    Raises
    ------
    HpcrlError
        The environment is not that of a job with this plan's layout; names the variable.
    """
    components = plan.layout.components
    if plan.layout.kind == "hetjob" and len(components) > 1:
        variables = [f"SLURM_JOB_NODELIST_HET_GROUP_{i}" for i in range(len(components))]
    else:
        variables = ["SLURM_JOB_NODELIST"]
    found = {}
    for i, variable in enumerate(variables):
        if variable not in environ:
            raise HpcrlError(f"{variable} is not set: this is no job with the layout {plan.layout.kind!r}")
        hosts = tuple(expand_hostlist(environ[variable]))
        hosts = hosts[: components[i].nodes] if spare else hosts
        if len(hosts) != components[i].nodes:
            raise HpcrlError(f"{variable} has {len(hosts)} nodes, the plan {components[i].nodes}")
        found[i, 0] = Allocation(hosts)
    return found


def launch_replica(
    plan: Plan,
    group: RoleGroup,
    replica: int,
    *,
    command: Sequence[str],
    cwd: Path,
    allocations: Allocations | None = None,
) -> Launch:
    """How to start one replica of a group.

    Parameters
    ----------
    plan, group, replica:
        What is started.
    command:
        What each task executes, placeholders filled.
    cwd:
        Working directory, the same on all nodes.
    allocations:
        Nodes at run time; not needed for a local plan.

    Raises
    ------
    HpcrlError
        The nodes of the replica are not there.
    """
    if plan.layout.kind == "local":
        return Launch(tuple(command), (), 1)
    assert allocations is not None, "a Slurm layout needs its allocations"
    component = plan.component(group)
    allocation, hosts = _hosts(plan, group, replica, allocations)
    argv = ["srun", *_which_job(plan, group.component, allocation)]
    argv += [
        f"--job-name={group.role.value}-{replica}",
        f"--nodes={group.nodes}",
        f"--nodelist={','.join(hosts)}",
        f"--ntasks={group.nodes}",
        "--ntasks-per-node=1",
        *_share(component, group),
        # a task may use all CPUs of its step: threads are set by the plan
        "--cpu-bind=none",
        # trainer ranks and vLLM do their own rendezvous
        "--mpi=none",
        # a rank that fails takes its replica with it, one that ends well waits for the others
        "--kill-on-bad-exit=1",
        "--wait=0",
        "--export=ALL",
        f"--chdir={cwd}",
    ]
    command = _seeing(command, component, group, replica)
    return Launch((*argv, *_contained(plan.container, group, component, command, cwd)), hosts, group.nodes)


def launch_on_nodes(plan: Plan, component: int, allocation: Allocation, *, command: Sequence[str]) -> Launch:
    """How one task of our own is started on each node of an allocation, beside whatever runs there.

    It runs on the node itself, also where roles run in a container: it asks about the node.

    Parameters
    ----------
    component:
        Index of the layout's component that the allocation is of.
    command:
        What each task executes.
    """
    nodes = len(allocation.hosts)
    argv = [
        "srun",
        *_which_job(plan, component, allocation),
        "--job-name=nodes",
        f"--nodes={nodes}",
        f"--nodelist={','.join(allocation.hosts)}",
        f"--ntasks={nodes}",
        "--ntasks-per-node=1",
        *_beside(plan.layout.components[component]),
        "--cpu-bind=none",
        "--mpi=none",
        "--kill-on-bad-exit=1",
        "--wait=0",
        "--export=ALL",
        *command,
    ]
    return Launch(tuple(argv), allocation.hosts, nodes)


def launch_shell(
    plan: Plan,
    group: RoleGroup,
    *,
    job_id: int,
    het_group: int | None = None,
    node: str,
    command: Sequence[str],
    terminal: bool,
) -> tuple[str, ...]:
    """The command line of a person's shell beside a role, from outside of the job.

    It overlaps with what runs there and sees the same GPUs; of a container it gets one of its own, of the same image.

    Parameters
    ----------
    job_id, het_group:
        The job with the node, and of a heterogeneous one the component that has it.
    command:
        What becomes the shell.
    terminal:
        Whether the caller has one.
    """
    component = plan.component(group)
    argv = [
        "srun",
        f"--jobid={job_id}",
        *([] if het_group is None else [f"--het-group={het_group}"]),
        "--job-name=shell",
        "--nodes=1",
        f"--nodelist={node}",
        "--ntasks=1",
        "--overlap",
        *(["--gres=none"] if group.beside and component.gres != "none" else []),
        "--cpu-bind=none",
        "--mpi=none",
        *(["--pty"] if terminal else ["--unbuffered"]),
        "--export=ALL",
        f"--chdir={plan.run_dir}",
    ]
    return (*argv, *_contained(plan.container, group, component, command, plan.run_dir))


def _hosts(plan: Plan, group: RoleGroup, replica: int, allocations: Allocations) -> tuple[Allocation, tuple[str, ...]]:
    job, places = plan.place(group, replica)
    allocation = allocations.get((group.component, job))
    label = f"{group.role.value} {replica}"
    if allocation is None:
        raise HpcrlError(f"{label} has no nodes: job {job} of component {group.component} is not running")
    if places.stop > len(allocation.hosts):
        raise HpcrlError(
            f"{label} needs nodes {places.start} to {places.stop - 1} of component {group.component}, "
            f"which has {len(allocation.hosts)}"
        )
    return allocation, allocation.hosts[places.start : places.stop]


def _which_job(plan: Plan, component: int, allocation: Allocation) -> list[str]:
    if allocation.job_id is not None:
        return [f"--jobid={allocation.job_id}"]
    # srun refuses the option in a job that is not heterogeneous, and takes group 0 without it in one that is
    heterogeneous = plan.layout.kind == "hetjob" and len(plan.layout.components) > 1
    return [f"--het-group={component}"] if heterogeneous else []


def _beside(component: JobComponent) -> list[str]:
    """A step without GPUs that may run where another step is."""
    return ["--overlap", *(["--gres=none"] if component.gres != "none" else [])]


def _share(component: JobComponent, group: RoleGroup) -> list[str]:
    """GPUs of the step, and whether it may run where another step is."""
    if group.beside:
        return _beside(component)
    if group.share is not None:
        # CPUs and GPUs of its own, which a restarted engine waits for as well; no memory of its own, because what is
        # written to /dev/shm and to files is charged to whoever touches it first
        return ["--exact", f"--cpus-per-task={group.share.cpus}", "--mem=0", *gpu_options(component, group.share.gpus)]
    # not --exact: without it a step has all CPUs and memory of its nodes, and a second one waits until it is gone,
    # so that a restarted engine never meets the GPU memory of the one before
    return gpu_options(component)


def gpu_options(component: JobComponent, gpus: int | None = None) -> list[str]:
    """How GPUs are asked for, the same for jobs and steps; ``gpus`` of each node, None: all."""
    if component.gres == "none" or component.gpus_per_node == 0:
        return []
    gpus = component.gpus_per_node if gpus is None else gpus
    if gpus == 0:
        return ["--gres=none"]
    kind = "" if component.gpu_type is None else f"{component.gpu_type}:"
    if component.gres == "gres":
        return [f"--gres=gpu:{kind}{gpus}"]
    return [f"--gpus-per-node={kind}{gpus}"]


def _seeing(command: Sequence[str], component: JobComponent, group: RoleGroup, replica: int) -> list[str]:
    """The command of a task, told which GPUs of a shared node are its own where Slurm knows of none."""
    if group.share is None or component.gres != "none" or not component.gpus_per_node:
        return list(command)
    visible = ",".join(map(str, group.share.gpus_of(replica)))
    return ["env", f"CUDA_VISIBLE_DEVICES={visible}", *command]


def _contained(
    container: Container | None, group: RoleGroup, component: JobComponent, command: Sequence[str], cwd: Path
) -> list[str]:
    """Container options and command."""
    if container is None:
        return list(command)
    check_working_directory(container, cwd)
    mounts = [*container.mounts, f"{cwd}:{cwd}"]
    mounts = list(dict.fromkeys(mounts))
    if container.kind == "pyxis":
        options = [f"--container-image={container.image}", f"--container-mounts={','.join(mounts)}"]
        options += [f"--container-workdir={cwd}"]
        options += ["--container-mount-home" if container.mount_home else "--no-container-mount-home"]
        # an image's own variables win over those of the step, unless they are named
        names = ["HPCRL_RUN_DIR", *sorted(group.env)]
        return [*options, f"--container-env={','.join(names)}", *command]
    gpus = component.gpus_per_node if group.share is None else group.share.gpus
    options = ["apptainer", "exec", *(["--nv"] if gpus and not group.beside else [])]
    options += [] if container.mount_home else ["--no-home"]
    for mount in mounts:
        options += ["--bind", mount]
    return [*options, "--pwd", os.fspath(cwd), container.image, *command]
