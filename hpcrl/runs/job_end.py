"""End of a run's job: the cause of an end by Slurm, Slurm's description of it, and the end of submitit's log."""

from __future__ import annotations

import contextlib
from pathlib import Path

from hpcrl.runs.cause import Cause, CauseKind
from hpcrl.runs.job_facts import JobFact
from hpcrl.runs.record import Submission
from hpcrl.runs.status import RunState

_LOG_END_BYTES = 4096
"""Number of bytes at the end of a log in which its last line is searched."""
#: ends for which Slurm knows the reason
_KINDS = {
    "TIMEOUT": CauseKind.TIME_LIMIT,
    "DEADLINE": CauseKind.TIME_LIMIT,
    "NODE_FAIL": CauseKind.NODE_FAIL,
    "BOOT_FAIL": CauseKind.NODE_FAIL,
    "PREEMPTED": CauseKind.PREEMPTED,
    "CANCELLED": CauseKind.CANCELLED,
    "REVOKED": CauseKind.CANCELLED,
}


def end_by_slurm(job: JobFact | None, ended_at_s: float) -> tuple[RunState, Cause] | None:
    """Return state and cause of a run that Slurm itself has ended; None where its job ended for another reason.

    ``ended_at_s`` (seconds since the epoch) is used where Slurm does not say when the job ended. This is the only place
    that makes a cause of Slurm's ends, whether a supervisor had begun or not.
    """
    if job is None or not job.ended or (kind := _KINDS.get(job.state)) is None:
        return None
    state = RunState.CANCELLED if kind is CauseKind.CANCELLED else RunState.FAILED
    return state, Cause(kind=kind, time_s=job.end_s or ended_at_s, message=slurm_words(job).removeprefix(": "))


def slurm_words(job: JobFact | None) -> str:
    """Return how Slurm calls the end of the job, as the end of a sentence; empty where Slurm was not asked."""
    if job is None:
        return ""
    if job.gone:
        return f": Slurm does not know job {job.job_id} any more"
    reason = f" ({job.reason})" if job.reason and job.reason != "None" else ""
    return f": Slurm says that job {job.job_id} is {job.state}{reason}"


def log_words(submission: Submission) -> str:
    """Return where submitit's log of a submission is, and its last line, as the end of a sentence."""
    folder, last = Path(submission.folder), ""
    with contextlib.suppress(OSError):
        newest = max(folder.glob(f"{submission.job_id}_*.err"), key=lambda path: path.stat().st_mtime, default=None)
        if newest is not None:
            with newest.open("rb") as stream:
                stream.seek(max(0, newest.stat().st_size - _LOG_END_BYTES))
                lines = stream.read().decode(errors="replace").rstrip().splitlines()
            last = lines[-1] if lines else ""
    return (f": {last}" if last else "") + f"; submitit's log is in {folder}"
