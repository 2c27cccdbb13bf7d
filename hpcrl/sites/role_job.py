"""The small job that runs a program on a node of a role, as the role would run there."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from hpcrl.compile_caches import COMPILE_CACHES
from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.plan import Plan, Role
from hpcrl.errors import DeadlineError, UsageError
from hpcrl.sites.small_job import SmallJob, end_of_log, find_file, job_directory, run_small_job
from hpcrl.slurm.client import SlurmClient
from hpcrl.slurm.directives import component_options
from hpcrl.slurm.states import JobState
from hpcrl.supervisor.launch.role_program import RoleProgram

_CPUS = 8
"""Maximum CPUs of the job."""
_START_S = 300.0
"""Seconds of the job in addition to those of the program: its node answers, and a container may be fetched."""
_LATE_S, _FAILED_S = 30.0, 5.0
"""Timeouts in seconds for the answer of a job that has ended, and of one that has failed."""


class RoleAnswer(NamedTuple):
    """Answer of a program on a node.

    Attributes
    ----------
    job_id, nodes:
        The job and Slurm's names of its nodes, of which there is one.
    text:
        The file that the program has written.
    """

    job_id: int
    nodes: list[str]
    text: bytes


def role_alone(plan: Plan, role: Role, *, memory_gib: float) -> Plan:
    """Return a plan of one replica of a role, on one node of the partition where the role runs, without GPUs.

    Parameters
    ----------
    plan:
        Plan of a run with the role.
    memory_gib:
        Memory of the job in GiB; less where the node has less.
    """
    group = plan.group(role)
    of_run = plan.component(group)
    component = of_run.model_copy(
        update={
            "nodes": 1,
            "spares": 0,
            "jobs": 1,
            "gpus_per_node": 0,
            "exclusive": False,
            "segment": None,
            "cpus": min(_CPUS, of_run.cpus),
            "memory_gib": min(memory_gib, of_run.memory_gib),
        }
    )
    places = {"component": 0, "first_node": 0, "share": None, "per_node": 0, "beside": False}
    # a run has caches of its own on the node's disk: each call would leave another directory there
    own = f"{plan.scratch}/hpcrl-{plan.run}/"
    env = {name: value for name, value in group.env.items() if name not in COMPILE_CACHES or not value.startswith(own)}
    group = group.model_copy(update={**places, "replicas": 1, "ranks": 1, "nodes": 1, "after": (), "env": env})
    layout = plan.layout.model_copy(update={"kind": "single", "components": (component,)})
    return plan.model_copy(update={"groups": (group,), "layout": layout})


def ask_role_node(
    cluster: SlurmCluster,
    plan: Plan,
    *,
    client: SlurmClient,
    root: Path,
    command: Callable[[Path], Sequence[str]],
    files: dict[str, bytes],
    answer: str,
    doing: str,
    timeout_s: float,
    wait_s: float,
    say: Callable[[str], None],
) -> RoleAnswer:
    """Run a program in a job on a node, and return the file that it has written.

    Parameters
    ----------
    plan:
        Plan of the role alone (`role_alone`).
    root:
        The runs root.
    command:
        Returns the program's command line for the directory of the job.
    files:
        Files in that directory, by name.
    answer:
        Name of the file that the program writes there.
    doing:
        Description of the program for messages: ``try the environments``.
    timeout_s:
        Maximum time of the program in seconds.
    wait_s:
        Maximum wait in the queue in seconds; then the job is cancelled.
    say:
        Takes lines on what becomes of the job.

    Raises
    ------
    UsageError
        The job has not begun in time, or ended without an answer; the message has the end of its log.
    SlurmError
        Slurm refuses the job, or does not answer.
    """
    (component,) = plan.layout.components
    with job_directory(root) as directory:
        for name, content in files.items():
            (directory / name).write_bytes(content)
        RoleProgram(
            cluster=cluster.model_dump_json(),
            plan=plan.model_dump_json(),
            command=list(command(directory)),
            timeout_s=timeout_s,
            doing=doing,
        ).write(directory)
        minutes = math.ceil((timeout_s + _START_S) / 60.0)
        job = SmallJob(
            directory,
            "hpcrl.supervisor.launch.role_program",
            [*component_options(component, plan.layout.sbatch_options), f"--time={minutes}"],
            f"a node of {component.partition} to {doing}",
            wait_s,
            # Slurm ends the job a while after its limit
            run_s=minutes * 60.0 + _START_S,
        )
        try:
            ended = run_small_job(cluster, job, client=client, say=say)
        except DeadlineError as error:
            raise UsageError(str(error)) from error
        late_s = _LATE_S if ended.state is JobState.COMPLETED else _FAILED_S
        found = find_file(directory, answer, late_s=late_s)
        if found is None:
            raise UsageError(
                f"job {ended.job_id} ended ({ended.state.value}) and could not {doing}; the end of its log:\n"
                f"{end_of_log(directory)}\n"
                "    hint: nodes must see the runs root and this Python under the same paths"
            )
        return RoleAnswer(ended.job_id, ended.nodes, found.read_bytes())
