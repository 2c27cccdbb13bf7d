"""Shell in the place of a role of a run: on its node, in its environment (`hpcrl.supervisor.launch.role_shell`)."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcrl.config.plan import Role
from hpcrl.errors import HpcrlError, RunDirError, UsageError
from hpcrl.processes import procfs
from hpcrl.processes.interpreter import module_command
from hpcrl.runs.observe import RunView, observe
from hpcrl.runs.record import RunRecord, Submission
from hpcrl.runs.registry import reference
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ComponentState, ComponentStatus
from hpcrl.slurm.command import command_environment
from hpcrl.slurm.hostlist import expand_hostlist
from hpcrl.slurm.launch_arguments import launch_shell
from hpcrl.slurm.lookup import slurm_client_of

_MODULE = "hpcrl.supervisor.launch.role_shell"


@dataclass(frozen=True)
class RoleShell:
    """The command that opens a shell in a role's environment.

    Attributes
    ----------
    argv, env:
        Command line and environment.
    where:
        Role and place, in words.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    where: str


def shell_in(
    run: RunDir, role: str, *, node: str | None = None, command: Sequence[str] = (), terminal: bool = True
) -> RoleShell:
    """Return the command of a shell in the place of a replica.

    Parameters
    ----------
    role:
        ``engine``, or ``engine/1`` for another replica than the first.
    node:
        One of the replica's nodes; its first by default.
    command:
        Executed in place of a shell.
    terminal:
        Whether there is a terminal.

    Raises
    ------
    UsageError
        The role, replica or node does not exist, or a shell has no terminal.
    RunDirError
        The run, or the replica, is not running.
    """
    name, replica = parse_replica(run, role)
    view = observe(run)
    component = running_replica(view, run, name, replica)
    if not terminal and not command:
        raise UsageError(
            "there is no terminal for a shell here\n"
            f"    hint: give it a command: hpcrl shell {reference(run)} --role {role} -- env"
        )
    plan = run.plan()
    group = plan.group(Role(name))
    python = group.python or plan.python or sys.executable
    inside = module_command(python, _MODULE, view.run_id, name, str(replica), *command)
    label = f"{name} {replica} of {run.name}"
    if not component.nodes:
        if view.host is not None and view.host != procfs.hostname():
            raise RunDirError(f"{run.name} runs on {view.host}, not here\n    hint: call this on {view.host}")
        if node is not None:
            raise UsageError(f"{label} runs on this machine: there is no node to choose")
        return RoleShell(tuple(inside), dict(os.environ), f"{label}, on this machine")
    if node is not None and node not in component.nodes:
        raise UsageError(f"{label} does not run on {node}\n    hint: its nodes are {', '.join(component.nodes)}")
    where = node or component.nodes[0]
    submission = RunRecord.read(run).submissions[-1]
    job_id, het_group = _job_on(where, component, submission)
    argv = launch_shell(plan, group, job_id=job_id, het_group=het_group, node=where, command=inside, terminal=terminal)
    conf = Path(submission.slurm_conf) if submission.slurm_conf else None
    return RoleShell(
        argv, command_environment(conf=conf, reading=False, cluster=submission.slurm_cluster), f"{label}, on {where}"
    )


def parse_replica(run: RunDir, text: str) -> tuple[str, int]:
    """Return the role and the replica that ``engine/1`` names (UsageError where the run has no such role)."""
    name, slash, number = text.partition("/")
    groups = {group.role.value: group for group in run.plan().groups}
    if name not in groups:
        raise UsageError(f"{run.name} has no role {name!r}\n    hint: it has {', '.join(sorted(groups))}")
    if slash and not number.isdecimal():
        raise UsageError(f"--role {text}: write a role, or a role and the number of a replica, such as {name}/0")
    return name, int(number or 0)


def running_replica(view: RunView, run: RunDir, role: str, replica: int) -> ComponentStatus:
    """Return a replica that has a process (RunDirError where it has none)."""
    named = reference(run)
    if view.state.ended:
        raise RunDirError(
            f"{run.name} has ended ({view.state}): it has no running processes\n"
            f"    hint: its output: hpcrl logs {named} --role {role}\n    hint: continue it: hpcrl resume {named}"
        )
    of_role = [component for component in view.components if component.role == role]
    found = next((component for component in of_role if component.replica == replica), None)
    if of_role and found is None:
        numbers = ", ".join(str(component.replica) for component in of_role)
        raise UsageError(f"{run.name} has no {role} {replica}\n    hint: its replicas are {numbers}")
    if found is None or found.pid is None or found.state.ended or found.state is ComponentState.RESTARTING:
        state = view.state if found is None else found.state
        raise RunDirError(
            f"{role} {replica} of {run.name} does not run now ({state})\n    hint: hpcrl status {named} --watch"
        )
    return found


def _job_on(node: str, component: ComponentStatus, submission: Submission) -> tuple[int, int | None]:
    """Return the job with a node; of a heterogeneous one its number and that of the component."""
    if component.job is not None and component.job.job_id is not None:
        return component.job.job_id, None
    job_id = int(submission.in_job or submission.job_id)
    for record in slurm_client_of(submission).details(job_id):
        if node in expand_hostlist(record.get("NodeList", "")):
            offset = record.get("HetJobOffset", "")
            return job_id, int(offset) if offset.isdecimal() else None
    raise HpcrlError(f"job {job_id} does not have node {node} any more\n    hint: hpcrl status says where it runs")
