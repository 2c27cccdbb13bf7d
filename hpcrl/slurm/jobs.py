"""The jobs of a run: submit them, ask about them, signal them. The callers have loaded and checked everything."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from hpcrl.config.cluster import SlurmCluster
from hpcrl.errors import RunDirError
from hpcrl.fs import atomic_write
from hpcrl.runs.observe import RunView, observe
from hpcrl.runs.record import RunRecord, Submission
from hpcrl.runs.rundir import RunDir
from hpcrl.slurm.client import SlurmClient
from hpcrl.slurm.directives import JobIdentity
from hpcrl.slurm.lookup import client_of
from hpcrl.slurm.render import Script, render_jobs
from hpcrl.slurm.slurm_executor import SlurmExecutor, batch_command
from hpcrl.supervisor.guard import KIND_VARIABLE, RUN_ID_VARIABLE
from hpcrl.supervisor.job import Supervise

__all__ = ["cancel_jobs", "signal_job", "submit_jobs"]

_JOB_FOLDER = "submitit"
_CANCEL_POLL_S = 0.5
_KILL_DEADLINE_S = 60.0


def submit_jobs(run: RunDir) -> Submission:
    """Hand the next attempt of a run to Slurm, and write down which jobs it got.

    If we die between the two, the jobs are there, and calling again finds them: a job is named by the run id and by
    the number of the submission.
    """
    plan, cluster, record = run.plan(), run.cluster(), RunRecord.read(run)
    assert isinstance(cluster, SlurmCluster)
    client = SlurmClient()
    submission_id = _submission_id(record)

    def submit(command: Sequence[str]) -> int:
        variables = {"SUBMITIT_EXECUTOR": "slurm", RUN_ID_VARIABLE: record.run_id, KIND_VARIABLE: "launch"}
        (script,) = render_jobs(
            plan,
            cluster,
            run_id=submission_id,
            command=lambda part: batch_command(command, variables),
            cwd=Path.cwd(),
            output=lambda part: run.path / _JOB_FOLDER / "%j_0_log.out",
        )
        return _submit_script(client, run, script, submission_id)

    after_attempt = (run.attempts() or [0])[-1]
    folder = run.path / _JOB_FOLDER
    job = SlurmExecutor(folder, submit=submit, time_limit_s=plan.time_limit_s).submit(Supervise(str(run.path)))
    submission = Submission(
        submitted_at_s=time.time(),
        executor="slurm",
        job_id=job.job_id,
        folder=str(folder),
        after_attempt=after_attempt,
        components=len(plan.layout.components),
        requeues=plan.attempts.requeue,
        slurm_conf=os.environ.get("SLURM_CONF", ""),
    )
    record.with_submission(submission).write(run)
    return submission


def _submission_id(record: RunRecord) -> str:
    """The run id, with a number from the second submission on: an ended job of the first must not be found."""
    number = len(record.submissions) + 1
    return record.run_id if number == 1 else f"{record.run_id}-{number}"


def _submit_script(client: SlurmClient, run: RunDir, script: Script, submission_id: str) -> int:
    path = run.path / script.file_name
    atomic_write(path, script.text.encode())
    identity = JobIdentity(run.name, submission_id, script.part)
    return client.submit(path, name=identity.name, token=identity.token).job_id


def cancel_jobs(run: RunDir, *, deadline_s: float) -> RunView:
    """Ask the supervisor to stop, and wait until the run has ended; then, or where it waits, cancel the job."""
    signal_job(run, kill=False)
    deadline = time.monotonic() + deadline_s
    killed = False
    while not (view := observe(run)).state.ended:
        if time.monotonic() > deadline:
            if killed:
                raise RunDirError(f"{run.name} was cancelled, but Slurm has not ended job {_newest(run).job_id} yet")
            signal_job(run, kill=True)
            killed, deadline = True, time.monotonic() + _KILL_DEADLINE_S
        time.sleep(_CANCEL_POLL_S)
    return view


def signal_job(run: RunDir, *, kill: bool) -> None:
    """SIGTERM to the supervisor; or cancel the job, which is also what a job without a supervisor gets."""
    submission = _newest(run)
    client, job_id = client_of(submission), int(submission.job_id)
    job = client.jobs([job_id]).get(job_id)
    if kill or job is None or job.state.waiting:
        client.cancel(job_id)
    else:
        client.cancel(job_id, signal="TERM", batch=True)


def _newest(run: RunDir) -> Submission:
    return RunRecord.read(run).submissions[-1]
