"""Ending an attempt early so that the next one begins: save, put the job back into the queue, go on from there."""

from __future__ import annotations

import time

from hpcrl.errors import DeadlineError, RunDirError
from hpcrl.runs.observe import RunView, observe
from hpcrl.runs.record import RunRecord
from hpcrl.runs.registry import reference
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunState
from hpcrl.slurm.lookup import ask_soon, slurm_client_of

_POLL_S = 0.5
_SLACK_S = 120.0
"""Beyond the time to save: for draining the roles, and for Slurm to take the job back."""


def check_requeue(run: RunDir) -> RunView:
    """Check that a run can be requeued now, and return its state. Nothing is changed.

    Raises
    ------
    RunDirError
        It has ended, waits already, is not a Slurm job, or may not be requeued; the message names the alternative.
    """
    view, record = observe(run), RunRecord.read(run)
    submission = record.submissions[-1] if record.submissions else None
    if view.state.ended:
        raise RunDirError(f"the run {run.name} has ended ({view.state})\n    hint: hpcrl resume {reference(run)}")
    if submission is None or submission.executor != "slurm":
        raise RunDirError(
            f"the run {run.name} is not a Slurm job, so it would not be started again\n"
            f"    hint: hpcrl cancel {reference(run)}, then hpcrl resume {reference(run)}"
        )
    if view.state in (RunState.SUBMITTED, RunState.REQUEUED):
        raise RunDirError(f"the run {run.name} waits in the queue already ({view.state})")
    if not submission.requeues:
        raise RunDirError(
            f"the run {run.name} was submitted without requeue (job.requeue, or the site's capabilities.requeue)\n"
            f"    hint: hpcrl cancel {reference(run)}, then hpcrl resume {reference(run)}"
        )
    return view


def requeue(run: RunDir) -> RunView:
    """Ask the supervisor to save and to requeue the job, as Slurm's own warning would; wait until it has.

    A supervisor that hangs is not waited for beyond the time that a save may take: then Slurm is asked itself, and
    the next attempt begins at the newest checkpoint there is.

    Raises
    ------
    RunDirError
        See `check_requeue`.
    DeadlineError
        Slurm has not taken the job back.
    """
    attempt = check_requeue(run).attempt
    submission = RunRecord.read(run).submissions[-1]
    client, job_id = slurm_client_of(submission), int(submission.job_id)
    client.cancel(job_id, signal="USR2", batch=True)
    ask_soon()
    lead_s = run.plan().attempts.signal_lead_s
    view = _wait(run, attempt, lead_s + _SLACK_S)
    if view is None:
        client.requeue(job_id)
        view = _wait(run, attempt, _SLACK_S)
    if view is None:
        raise DeadlineError(
            f"job {job_id} of {run.name} is not back in the queue {_SLACK_S:g} s after Slurm was asked\n"
            f"    hint: look at it: scontrol show job {job_id}"
        )
    return view


def _wait(run: RunDir, attempt: int, timeout_s: float) -> RunView | None:
    """Return the view once the attempt is over; None where that took longer than ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        view = observe(run)
        if view.state is RunState.REQUEUED or view.state.ended or view.attempt > attempt:
            return view
        time.sleep(_POLL_S)
    return None
