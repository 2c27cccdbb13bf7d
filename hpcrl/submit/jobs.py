"""The jobs of a run: submit them, ask about them, signal them. The callers have loaded and checked everything."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.plan import Plan
from hpcrl.errors import HpcrlError, RunDirError
from hpcrl.runs.contents import RunContents
from hpcrl.runs.copies import original_of
from hpcrl.runs.elastic import wanted_replicas
from hpcrl.runs.observe import RunView, observe
from hpcrl.runs.record import RunRecord, Submission, this_process
from hpcrl.runs.registry import reference
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ProcessId, RunStatus
from hpcrl.slurm.client import SlurmClient
from hpcrl.slurm.directives import JobIdentity
from hpcrl.slurm.errors import NoSuchJobError, SlurmRejectedError
from hpcrl.slurm.exclude import nodes_to_exclude
from hpcrl.slurm.lookup import ask_soon, slurm_client_of
from hpcrl.slurm.queries import job_comment
from hpcrl.slurm.records import Submitted
from hpcrl.slurm.render import Script, planned_parts
from hpcrl.slurm.replica_jobs import ReplicaJobs, cancel_all
from hpcrl.slurm.scripts import JOB_FOLDER, run_scripts, submission_id
from hpcrl.slurm.states import parse_state
from hpcrl.storage.files import atomic_write
from hpcrl.storage.retry import retry_transient
from hpcrl.submit.slurm_executor import SlurmExecutor
from hpcrl.supervisor.job import Supervise
from hpcrl.supervisor.process.sweep import find_leftovers
from hpcrl.supervisor.recovery.attempts import with_measured_lead

_CANCEL_POLL_S = 0.5
_RECORD_S = 5.0
"""Maximum seconds of retries of a filesystem that refuses the record."""
_KILL_DEADLINE_S = 60.0


def submit_jobs(contents: RunContents, after: Sequence[int] = ()) -> Submission:
    """Hand the next attempt of a run to Slurm, and write down which jobs it got.

    The main job comes first, then the record, then jobs of replicas (layout ``elastic``). If we die after the first,
    calling again finds it: a job is named by the run id and by the number of the submission. If we die later, the
    supervisor submits what is missing when it runs, and a cancel finds all of them. Slurm starts the main job once the
    jobs ``after`` have ended, and those of replicas once the main job has started.
    """
    client, run = SlurmClient(), contents.run
    plan = with_measured_lead(run, contents.plan)
    submission = _submit_main(contents._replace(plan=plan), client, after)
    record = contents.record.with_submission(submission)
    write_submission(run, record)
    if plan.layout.kind == "elastic":
        replicas = ReplicaJobs(run, plan=plan, client=client, number=len(record.submissions))
        wanted = wanted_replicas(run, plan)
        for group in plan.groups:
            for replica in range(wanted.get(group.role.value, 0)):
                replicas.submit(group, replica, after=int(submission.job_id))
    return submission


def write_submission(run: RunDir, record: RunRecord) -> None:
    """Record the job that an attempt was handed to, after it has been.

    Raises
    ------
    HpcrlError
        The filesystem refuses; the attempt continues nevertheless.
    """
    try:
        retry_transient(lambda: record.write(run), limit_s=_RECORD_S, what="the record of the run")
    except OSError as error:
        submission = record.submissions[-1]
        raise HpcrlError(
            f"the run {run.name} was handed over (job {submission.job_id}) and continues, but this cannot be "
            f"recorded: {run.record_path}: {error.strerror}\n"
            f"    hint: make the filesystem writable again; `hpcrl status {reference(run)}` shows the run anyway"
        ) from error


def _submit_main(contents: RunContents, client: SlurmClient, after: Sequence[int]) -> Submission:
    run, cluster, plan, record = contents
    assert isinstance(cluster, SlurmCluster)
    number = len(record.submissions) + 1
    excluded = nodes_to_exclude(run, plan, client)

    submitted: list[Submitted] = []

    def submit() -> int:
        parts = [part for part in planned_parts(plan) if part.name == "main"]
        (script,) = run_scripts(
            plan, cluster, run_id=record.run_id, run_dir=run.path, number=number, exclude=excluded, parts=parts
        )
        submitted.append(_submit_script(client, run, script, submission_id(record.run_id, number), after))
        return submitted[-1].job_id

    after_attempt = (run.attempts() or [0])[-1]
    folder = run.path / JOB_FOLDER
    job = SlurmExecutor(folder, submit=submit, time_limit_s=plan.time_limit_s).submit(Supervise(str(run.path), number))
    return _submission(run, plan, int(job.job_id), after_attempt, submitted[-1].cluster)


def _submission(run: RunDir, plan: Plan, job_id: int, after_attempt: int, cluster: str = "") -> Submission:
    return Submission(
        submitted_at_s=time.time(),
        executor="slurm",
        job_id=str(job_id),
        folder=str(run.path / JOB_FOLDER),
        after_attempt=after_attempt,
        components=1 if plan.layout.kind == "elastic" else len(plan.layout.components),
        requeues=plan.attempts.requeue,
        slurm_conf=os.environ.get("SLURM_CONF", ""),
        # a job that was found again has no record of its place; of several names the shell's is unknown, too
        slurm_cluster=cluster or (asked if (asked := os.environ.get("SLURM_CLUSTERS", "")).count(",") == 0 else None),
        submitted_by=this_process(),
        user_id=os.getuid(),
    )


def find_unrecorded(run: RunDir) -> RunRecord:
    """Return the record of a run, with its first submission where the submitter died before it recorded it.

    A job is found by its name and comment, a local run by its processes, or by the status that its supervisor wrote.
    """
    record = RunRecord.read(run)
    if record.submissions or original_of(run, record) is not None:
        return record
    plan = run.plan()
    if plan.layout.kind == "local":
        return _with_local_start(run, record)
    identity = JobIdentity(run.name, submission_id(record.run_id, 1))
    jobs = [job for job in SlurmClient().find(name=identity.name, token=identity.token) if not job.state.ended]
    if jobs:
        record = record.with_submission(_submission(run, plan, jobs[-1].job_id, 0))
        record.write(run)
    return record


def _with_local_start(run: RunDir, record: RunRecord) -> RunRecord:
    processes = find_leftovers(record.run_id, kinds=("launch",), run_dir=run.path)
    status = RunStatus.read(run)
    if not processes and status is None:
        return record
    first = min(processes, key=lambda process: process.start_ticks, default=None)
    submission = Submission(
        submitted_at_s=time.time() if status is None else status.started_at_s,
        executor="local",
        job_id="" if first is None else str(first.pid),
        folder=str(run.path / JOB_FOLDER),
        after_attempt=0,
        process=None if first is None else ProcessId.of(first.pid),
    )
    record = record.with_submission(submission)
    record.write(run)
    return record


def hidden_job(record: RunRecord) -> str:
    """Return the state of a run's newest job where the controller knows it and ``squeue`` does not; else empty.

    A site's ``squeue`` may answer from a cache, or from a backup that is behind; ``scontrol`` asks the controller.
    """
    submission = record.submissions[-1]
    comment = job_comment(submission_id(record.run_id, len(record.submissions)))
    try:
        records = slurm_client_of(submission).details(int(submission.job_id))
    except (NoSuchJobError, SlurmRejectedError):
        return ""
    ours = [each for each in records if comment in each.get("Comment", "")]
    states = [each.get("JobState", "") for each in ours if not parse_state(each.get("JobState")).ended]
    # an unknown state is not an end
    return states[0] or "UNKNOWN" if states else ""


def _submit_script(
    client: SlurmClient, run: RunDir, script: Script, submission_id: str, after: Sequence[int]
) -> Submitted:
    path = run.path / script.file_name
    atomic_write(path, script.text.encode())
    identity = JobIdentity(run.name, submission_id, script.part)
    # afterany: a run that failed, or was cancelled, makes room as well
    options = [f"--dependency=afterany:{':'.join(map(str, after))}"] if after else []
    return client.submit(path, name=identity.name, token=identity.token, options=options)


def cancel_jobs(run: RunDir, *, deadline_s: float) -> RunView:
    """Ask the supervisor to stop, and wait until the run has ended; then, or where it waits, cancel all its jobs.

    Parameters
    ----------
    deadline_s:
        Seconds that the supervisor gets to end by itself, before the main job is cancelled.

    Returns
    -------
    RunView
        The run as it ended.

    Raises
    ------
    RunDirError
        Slurm has cancelled the job and not ended it yet.
    SlurmError
        Slurm refused, or does not answer.
    """
    # a waiting job has no supervisor that would take time to stop
    killed = signal_job(run, kill=False)
    deadline = time.monotonic() + (_KILL_DEADLINE_S if killed else deadline_s)
    while not (view := observe(run)).state.ended:
        if time.monotonic() > deadline:
            if killed:
                raise RunDirError(f"{run.name} was cancelled, but Slurm has not ended job {_newest(run).job_id} yet")
            signal_job(run, kill=True)
            killed, deadline = True, time.monotonic() + _KILL_DEADLINE_S
        time.sleep(_CANCEL_POLL_S)
    # the main job is about to end by itself, and writes the last line of its log
    cancel_replica_jobs(run)
    return view


def cancel_replica_jobs(run: RunDir) -> list[int]:
    """Cancel what is left of the jobs of replicas; returns their ids."""
    if run.plan().layout.kind != "elastic":
        return []
    record = RunRecord.read(run)
    if original_of(run, record) is not None:
        return []
    client = slurm_client_of(record.submissions[-1]) if record.submissions else SlurmClient()
    return cancel_all(client, record.run_id, keep_main=True)


def signal_job(run: RunDir, *, kill: bool) -> bool:
    """Send SIGTERM to the supervisor; or cancel the job, which also happens to a job without a supervisor.

    Returns whether the job was cancelled.
    """
    submission = _newest(run)
    client, job_id = slurm_client_of(submission), int(submission.job_id)
    job = client.jobs([job_id]).get(job_id)
    cancels = kill or job is None or job.state.waiting
    if cancels:
        client.cancel(job_id)
    else:
        client.cancel(job_id, signal="TERM", batch=True)
    ask_soon()
    return cancels


def _newest(run: RunDir) -> Submission:
    return RunRecord.read(run).submissions[-1]
