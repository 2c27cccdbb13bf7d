"""Run inside an existing allocation: ``salloc``, then ``hpcrl submit --in-job``.

Nothing is submitted. The supervisor is a separate process next to the calling shell, and its roles are steps of the
shell's job. That job belongs to the user: hpcrl does not requeue, cancel or extend it.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass

from hpcrl.config.plan import Plan
from hpcrl.errors import UsageError
from hpcrl.slurm.client import SlurmClient
from hpcrl.slurm.directives import component_options
from hpcrl.slurm.hostlist import expand_hostlist
from hpcrl.slurm.states import JobState

_LEAVE_S = 30.0
"""Seconds between the run's limit and the end of the job: roles are asked to stop, and record why."""


@dataclass(frozen=True)
class InJob:
    """Job in which a run is started; ``end_s`` is its end in seconds since the epoch, None where it has none."""

    job_id: int
    end_s: float | None


def find_allocation(plan: Plan, environ: Mapping[str, str], client: SlurmClient) -> InJob:
    """Return the existing allocation of the calling shell, which must hold the plan.

    Raises
    ------
    UsageError
        There is none, it belongs to another user, does not run, is heterogeneous, has too few nodes, or ends too soon.
    SlurmError
        Slurm cannot be asked.
    """
    if plan.layout.kind != "single":
        raise UsageError(
            f"a run inside an allocation needs the layout single, this plan has {plan.layout.kind}\n"
            "    hint: --set job.layout=single, or leave --in-job out"
        )
    (component,) = plan.layout.components
    words = [word for word in component_options(component) if not word.startswith("--ntasks")]
    salloc = shlex.join(["salloc", *words, f"--time={_minutes(plan)}"])
    get_one = f"    hint: {salloc}, and the same command in there"
    if not environ.get("SLURM_JOB_ID", "").isdecimal():
        raise UsageError(f"this shell has no allocation (SLURM_JOB_ID is not set)\n{get_one}")
    job_id = int(environ["SLURM_JOB_ID"])
    if int(environ.get("SLURM_HET_SIZE") or 1) > 1:
        raise UsageError(f"job {job_id} is heterogeneous; a run fits into a plain allocation only\n{get_one}")
    hosts = expand_hostlist(environ.get("SLURM_JOB_NODELIST", ""))
    if len(hosts) < component.nodes:
        raise UsageError(f"job {job_id} has {len(hosts)} nodes, the run needs {component.nodes}\n{get_one}")
    job = client.jobs([job_id]).get(job_id)
    if job is None or job.state is not JobState.RUNNING:
        state = "not known to Slurm" if job is None else f"{job.state}"
        raise UsageError(f"job {job_id} of this shell is {state}\n{get_one}")
    end_s = job.leader.end_time_s if job.leader.time_limit_s is not None else None
    needed_s = plan.attempts.signal_lead_s + 2 * _LEAVE_S
    if end_s is not None and end_s - time.time() < needed_s:
        raise UsageError(
            f"job {job_id} ends in {max(0.0, end_s - time.time()):.0f} s; saving and ending takes {needed_s:g} s "
            f"(limits.save_timeout_s of the profile)\n{get_one}"
        )
    return InJob(job_id, end_s)


def plan_inside(plan: Plan, job: InJob, *, now_s: float) -> Plan:
    """Return the plan of an attempt in an existing allocation.

    It ends before the job does, saves by the clock, and is not requeued.

    Parameters
    ----------
    now_s:
        Seconds since the epoch; a job without an end (``end_s`` is None) limits nothing.
    """
    limit_s = plan.time_limit_s if job.end_s is None else min(plan.time_limit_s, job.end_s - now_s - _LEAVE_S)
    attempts = plan.attempts.model_copy(update={"requeue": False, "signalled": False})
    return plan.model_copy(update={"attempts": attempts, "time_limit_s": max(limit_s, 1.0)})


def _minutes(plan: Plan) -> int:
    return max(1, int(plan.time_limit_s // 60))
