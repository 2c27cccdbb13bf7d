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


@dataclass(frozen=True)
class Allocation:
    """Nodes of one job of a component.

    Attributes
    ----------
    hosts:
        Node names in Slurm's order. Slurm numbers the tasks of a step in this order whatever ``--nodelist`` says;
        replicas take adjacent nodes, so that their order is the same.
    job_id:
        Set where it is another job than the one that launches.
    """

    hosts: tuple[str, ...]
    job_id: str | None = None


Allocations = Mapping[tuple[int, int], Allocation]
"""Allocations by component and by job of the component."""


@dataclass(frozen=True)
class Launch:
    """Command that starts a replica.

    Attributes
    ----------
    argv:
        The whole command line.
    hosts:
        Its nodes; it listens on the first. Empty for a local process.
    tasks:
        Number of processes that the command line starts.
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
"""Variables ``SLURM_JOB_*`` that are options nevertheless."""
_SLURMS = ("SLURM_", "SLURMD_", "SLURMSTEPD_", "SRUN_", "SBATCH_", "SALLOC_", "PMI_", "PMI2_", "PMIX_")
_OF_COMPONENT = re.compile(r"_(?:HET|PACK)_GROUP_\d+$")
"""Suffix of a variable of one component of a heterogeneous job."""


def step_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for ``srun``: of Slurm's own variables only those that describe the allocation."""
    return {name: value for name, value in environ.items() if not name.startswith(_SLURMS) or _describes(name)}


def _describes(name: str) -> bool:
    name = _OF_COMPONENT.sub("", name)
    return name in _ALLOCATION or (name.startswith("SLURM_JOB_") and name not in _OPTIONS_OF_STEPS)


def outside_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for ``srun --jobid`` into another job, without Slurm's variables of the current job.

    Otherwise the step gets the node list and counts of the current job instead of its own (observed on 22.05).
    """
    return {
        name: value
        for name, value in step_environment(environ).items()
        if name in CLUSTER_VARIABLES or not name.startswith(_SLURMS)
    }


def hosts_from_env(plan: Plan, environ: Mapping[str, str]) -> dict[int, tuple[str, ...]]:
    """Return the nodes by component that the batch script's environment names: those with which the job began.

    In the layout ``elastic`` this is the current job, as component 0; jobs of engines are found by their ids.

    Raises
    ------
    HpcrlError
        The environment is not that of a job with this plan's layout; the message names the variable.
    """
    components = plan.layout.components
    if plan.layout.kind == "hetjob" and len(components) > 1:
        variables = [f"SLURM_JOB_NODELIST_HET_GROUP_{i}" for i in range(len(components))]
    else:
        variables = ["SLURM_JOB_NODELIST"]
    found = {}
    for i, variable in enumerate(variables):
        if variable not in environ:
            raise HpcrlError(f"{variable} is not set: this is not a job with the layout {plan.layout.kind!r}")
        found[i] = tuple(expand_hostlist(environ[variable]))
        if len(found[i]) < components[i].nodes:
            raise HpcrlError(f"{variable} has {len(found[i])} nodes, the plan {components[i].nodes}")
    return found


def allocations_from_env(
    plan: Plan, environ: Mapping[str, str], *, spare: bool = False
) -> dict[tuple[int, int], Allocation]:
    """Return the allocations that the batch script's environment names (`hosts_from_env`).

    Parameters
    ----------
    spare:
        Accept more nodes than the plan has: the first of them are taken.

    Raises
    ------
    HpcrlError
        The environment is not that of a job with this plan's layout; the message names the variable.
    """
    found = {}
    for i, hosts in hosts_from_env(plan, environ).items():
        component = plan.layout.components[i]
        if not spare and len(hosts) != component.asked:
            raise HpcrlError(f"component {i} of the job has {len(hosts)} nodes, the plan {component.asked}")
        found[i, 0] = Allocation(hosts[: component.nodes])
    return found


def launch_replica(
    plan: Plan,
    group: RoleGroup,
    replica: int,
    *,
    command: Sequence[str],
    cwd: Path,
    allocations: Allocations | None = None,
    overlap: bool = False,
) -> Launch:
    """Return the command that starts one replica of a group.

    Parameters
    ----------
    plan, group, replica:
        The replica to start.
    command:
        Command of each task, placeholders filled.
    cwd:
        Working directory, the same on all nodes.
    allocations:
        Nodes at run time; not needed for a local plan.
    overlap:
        Start a replica that has whole nodes also where Slurm has not ended an earlier step, or counts it still.

    Raises
    ------
    HpcrlError
        The nodes of the replica are not available.
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
        *(["--overlap"] if overlap and not group.beside and group.share is None else []),
        # a task may use all CPUs of its step: threads are set by the plan
        "--cpu-bind=none",
        # trainer ranks and vLLM do their own rendezvous
        "--mpi=none",
        # a failed rank ends its replica; one that ends cleanly leaves the others running
        "--kill-on-bad-exit=1",
        "--wait=0",
        "--export=ALL",
        f"--chdir={cwd}",
    ]
    command = _seeing(command, component, group, replica)
    return Launch((*argv, *_contained(plan.container, group, component, command, cwd)), hosts, group.nodes)


def launch_on_nodes(plan: Plan, component: int, allocation: Allocation, *, command: Sequence[str]) -> Launch:
    """Return the command that starts one task on each node of an allocation, concurrently with its other steps.

    It runs on the node itself, also where roles run in a container: it examines the node.

    Parameters
    ----------
    component:
        Index of the layout's component that the allocation belongs to.
    command:
        Command of each task.
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
    """Return the command line of a person's shell on a role's node, from outside of the job.

    It overlaps with the running steps and sees the same GPUs; with a container it gets one of its own, of the same
    image.

    Parameters
    ----------
    job_id, het_group:
        The job with the node, and of a heterogeneous job the component that has it.
    command:
        Command that becomes the shell.
    terminal:
        Whether the caller has a terminal.
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
    """Return the options of a step without GPUs that may overlap with other steps."""
    return ["--overlap", *(["--gres=none"] if component.gres != "none" else [])]


def _share(component: JobComponent, group: RoleGroup) -> list[str]:
    """Return options for the GPUs of the step, and for overlapping with other steps."""
    if group.beside:
        return _beside(component)
    if group.share is not None and group.share.same:
        # every step has all GPUs, and the command sees its own alone: of steps that overlap Slurm may give two the
        # same GPU
        return ["--overlap", *gpu_options(component)]
    if group.share is not None:
        # exclusive CPUs and GPUs, for which a restarted engine waits as well; no exclusive memory, because pages of
        # /dev/shm and of files are charged to the step that touches them first
        memory = 0 if group.share.memory_gib is None else int(group.share.memory_gib * 1024)
        options = ["--exact", f"--cpus-per-task={group.share.cpus}", f"--mem={memory}"]
        return [*options, *gpu_options(component, group.share.gpus)]
    # without --exact a step has all CPUs and memory of its nodes, and a second step waits until it has ended, so that a
    # restarted engine never finds the GPU memory of the previous one in use
    return gpu_options(component)


def gpu_options(component: JobComponent, gpus: int | None = None) -> list[str]:
    """Return the options that request GPUs, the same for jobs and steps; ``gpus`` per node, None: all."""
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
    """Return the command of a task, with its GPUs of a shared node set where Slurm does not choose them."""
    if group.share is None or not component.gpus_per_node or not (component.gres == "none" or group.share.same):
        return list(command)
    visible = ",".join(map(str, group.share.gpus_of(replica)))
    return ["env", f"CUDA_VISIBLE_DEVICES={visible}", *command]


def _contained(
    container: Container | None, group: RoleGroup, component: JobComponent, command: Sequence[str], cwd: Path
) -> list[str]:
    """Return container options and command."""
    if container is None:
        return list(command)
    check_working_directory(container, cwd)
    mounts = [*container.mounts, f"{cwd}:{cwd}"]
    mounts = list(dict.fromkeys(mounts))
    if container.kind == "pyxis":
        options = [f"--container-image={container.image}", f"--container-mounts={','.join(mounts)}"]
        options += [f"--container-workdir={cwd}"]
        options += ["--container-mount-home" if container.mount_home else "--no-container-mount-home"]
        # variables of an image override those of the step, unless they are named here
        names = ["HPCRL_RUN_DIR", *sorted(group.env)]
        return [*options, f"--container-env={','.join(names)}", *command]
    gpus = component.gpus_per_node if group.share is None else group.share.gpus
    options = ["apptainer", "exec", *(["--nv"] if gpus and not group.beside else [])]
    options += [] if container.mount_home else ["--no-home"]
    for mount in mounts:
        options += ["--bind", mount]
    return [*options, "--pwd", os.fspath(cwd), container.image, *command]
