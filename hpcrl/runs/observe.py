"""Observe the state of a run, also when its supervisor cannot report it any more."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from hpcrl.errors import RunDirError
from hpcrl.runs.cause import Cause, CauseKind
from hpcrl.runs.clocks import NodeClock
from hpcrl.runs.copies import original_of
from hpcrl.runs.exclusions import read_exclusions
from hpcrl.runs.job_end import end_by_slurm, log_words, slurm_words
from hpcrl.runs.job_facts import JobFact, query_jobs
from hpcrl.runs.missing_end import cancelled_cause, view_without_end
from hpcrl.runs.record import RunRecord, Submission
from hpcrl.runs.rundir import PlanNames, RunDir
from hpcrl.runs.status import ComponentStatus, ProcessId, RunState, RunStatus

_SUBMIT_GRACE_S = 60.0
"""Time in seconds for which a submission without a local controller counts as running before its supervisor writes."""
_KNOWN_GRACE_S = 120.0
"""Time in seconds for which Slurm may not know a job that it has just accepted: answers may come from a cache or a
backup."""
_UNTOLD = (
    "Slurm has requeued the job by itself: the supervisor was lost before it could record nodes to avoid; the next "
    "attempt determines them, and is requeued once if it began on one of them"
)


class RunView(msgspec.Struct, frozen=True, kw_only=True):
    """State of a run as a reader sees it now.

    Attributes
    ----------
    state, cause:
        See `hpcrl.runs.status.RunState`.
    attempt, attempts:
        The attempt the state is about (0 before the first), and how many there were.
    supervisor, host, pid:
        The supervisor of that attempt.
    created_at_s, started_at_s, heartbeat_s, ended_at_s:
        Seconds since the epoch. ``ended_at_s`` of a lost run is when it was noticed.
    components:
        All replicas.
    warnings:
        Warnings of the supervisor (`hpcrl.runs.status.RunStatus`).
    job:
        Slurm's state of the job; None for a local run, and where Slurm was not asked.
    nodes_needed:
        Nodes that its (main) job asks for, while that waits; else 0.
    elastic:
        It waits, and its replicas have jobs of their own.
    origin:
        Origin of its start weights, in words; empty where it is ``model.path``.
    clocks:
        Offsets of the clocks of nodes (`hpcrl.runs.clocks`).
    spare_nodes, lost_nodes:
        Nodes of the job that no role uses yet, and those that are not used any more, with the reason of each
        (`hpcrl.runs.status.RunStatus`).
    copy_of:
        The run directory that this one is a copy of; empty where it is the run itself. Its state is what was copied:
        processes and jobs are the original's.
    """

    name: str
    run_id: str
    run_dir: str
    recipe: str
    cluster: str
    state: RunState
    attempt: int
    attempts: int
    created_at_s: float
    started_at_s: float | None = None
    heartbeat_s: float | None = None
    ended_at_s: float | None = None
    host: str | None = None
    pid: int | None = None
    supervisor: ProcessId | None = None
    cause: Cause | None = None
    components: list[ComponentStatus] = []
    warnings: list[str] = []
    job: JobFact | None = None
    nodes_needed: int = 0
    elastic: bool = False
    origin: str = ""
    clocks: dict[str, NodeClock] = {}
    spare_nodes: list[str] = []
    lost_nodes: dict[str, str] = {}
    copy_of: str = ""

    @property
    def wall_s(self) -> float | None:
        """Return the seconds of this attempt so far."""
        if self.started_at_s is None:
            return None
        return (self.ended_at_s or time.time()) - self.started_at_s


def observe(run: RunDir, *, now_s: float | None = None) -> RunView:
    """Return the state of a run now.

    A status without an end whose supervisor is gone is ``LOST``, or ``CANCELLED`` where a cancel was requested. A
    submission that no supervisor has answered yet is ``SUBMITTED`` as long as its controller runs. Under Slurm a run is
    over when its job is; a dead supervisor whose job waits again is ``REQUEUED``. A run is lost only if its status is
    the same after the end of the supervisor was seen, and, if that was on another machine, a minute after the end of
    the job: until then it is ``STOPPING``. Where Slurm was not asked, or does not answer, the state is the last one
    that was written.

    Raises
    ------
    RunDirError
        The directory is not a run.
    """
    return _view(_read(run), time.time() if now_s is None else now_s)


class _Files(NamedTuple):
    """Files of a run, each read once.

    Attributes
    ----------
    original:
        Directory of the run that this directory is a copy of; None where it is not a copy.
    """

    run: RunDir
    record: RunRecord
    status: RunStatus | None
    names: PlanNames
    original: Path | None


def _read(run: RunDir) -> _Files:
    """Read the files of which a view is made (RunDirError where the directory is not a run)."""
    record, status, names = RunRecord.read(run), RunStatus.read(run), run.names()
    return _Files(run, record, status, names, original_of(run, record, names.run_dir))


def _view(files: _Files, now_s: float) -> RunView:
    """Return the view of `observe`, from files that were just read."""
    return _view_of_run(files, now_s) if files.original is None else _view_of_copy(files, files.original)


def _view_of_run(files: _Files, now_s: float) -> RunView:
    run, record, status, names, _ = files
    submission = record.submissions[-1] if record.submissions else None
    attempts = run.attempts()
    view = RunView(
        name=record.name,
        run_id=record.run_id,
        run_dir=str(run.path),
        recipe=names.recipe,
        cluster=names.cluster,
        state=RunState.SUBMITTED,
        attempt=attempts[-1] if attempts else 0,
        attempts=len(attempts),
        created_at_s=record.created_at_s,
        origin="" if record.origin is None else str(record.origin),
        job=None if submission is None or _has_last_word(status, submission) else _ask(submission),
    )
    if view.job is not None and view.job.waiting:
        layout = run.plan().layout
        view = msgspec.structs.replace(view, nodes_needed=layout.main_nodes, elastic=layout.kind == "elastic")
    if status is None or (submission is not None and status.attempt <= submission.after_attempt):
        found = _not_started(view, record) or _before_first_word(view, submission, now_s)
        return (_judged_again(run, status, now_s) or found) if found.state.ended else found
    view = msgspec.structs.replace(
        view,
        state=status.state,
        attempt=status.attempt,
        started_at_s=status.started_at_s,
        heartbeat_s=status.heartbeat_s,
        ended_at_s=status.ended_at_s,
        host=status.supervisor.host,
        pid=status.supervisor.pid,
        supervisor=status.supervisor,
        cause=status.cause,
        components=status.components,
        warnings=[] if status.state.ended else status.warnings,
        clocks=status.clocks,
        spare_nodes=status.spare_nodes,
        lost_nodes=status.lost_nodes,
    )
    if view.job is not None and view.job.waiting:
        untold = [_UNTOLD] if _lost_unseen(run, status, now_s) else []
        return msgspec.structs.replace(
            view, state=RunState.REQUEUED, ended_at_s=None, warnings=[*view.warnings, *untold]
        )
    lives = status.state is not RunState.REQUEUED and status.supervisor_alive(now_s)
    if status.state.ended or lives:
        return view
    if not _job_is_over(view.job, submission):
        return _between(view, run)
    return _judged_again(run, status, now_s) or view_without_end(view, run, submission, now_s)


def _view_of_copy(files: _Files, original: Path) -> RunView:
    """Return the state of a copy, which has no processes, whatever its files say.

    Slurm is not asked about the original's job.
    """
    run, record, status, names, _ = files
    attempts = run.attempts()
    ended = status is not None and status.state.ended
    cause = Cause(
        kind=CauseKind.SUPERVISOR_LOST,
        time_s=record.created_at_s if status is None else status.heartbeat_s,
        message=f"this is a copy of {original}, made before that had ended",
    )
    words = f"it is a copy of {original}; hpcrl resume turns it into a separate run"
    return RunView(
        name=run.name,
        run_id=record.run_id,
        run_dir=str(run.path),
        recipe=names.recipe,
        cluster=names.cluster,
        state=status.state if status is not None and ended else RunState.LOST,
        attempt=0 if status is None else status.attempt,
        attempts=len(attempts),
        created_at_s=record.created_at_s,
        started_at_s=None if status is None else status.started_at_s,
        heartbeat_s=None if status is None else status.heartbeat_s,
        ended_at_s=status.ended_at_s if status is not None and ended else cause.time_s,
        cause=status.cause if status is not None and ended else cause,
        warnings=[words],
        origin="" if record.origin is None else str(record.origin),
        copy_of=str(original),
    )


def open_job(run: RunDir) -> Submission | None:
    """Return the newest submission to Slurm, where only Slurm can determine the state of the run.

    None where the run has recorded its end, or has no job.

    Raises
    ------
    RunDirError
        The directory is not a run.
    """
    record = RunRecord.read(run)
    if not record.submissions or record.submissions[-1].executor != "slurm":
        return None
    newest = record.submissions[-1]
    if original_of(run, record) is not None:
        return None
    return None if _has_last_word(RunStatus.read(run), newest) else newest


def observe_all(runs: Iterable[RunDir]) -> Iterator[tuple[RunDir, RunRecord, RunView]]:
    """Observe many runs, in their order (see `observe`); unreadable ones are left out.

    Slurm is asked about the jobs of all runs at once.
    """
    found, open_ends = [], []
    for run in runs:
        with contextlib.suppress(RunDirError, OSError, ValueError):
            files = _read(run)
            found.append(files)
            submissions, theirs = files.record.submissions, files.original is not None
            if submissions and not theirs and not _has_last_word(files.status, submissions[-1]):
                open_ends.append(submissions[-1])
    query_jobs(open_ends)
    for files in found:
        with contextlib.suppress(RunDirError, OSError, ValueError):
            yield files.run, files.record, _view(files, time.time())


def _lost_unseen(run: RunDir, status: RunStatus, now_s: float) -> bool:
    """Return whether an attempt whose job waits again ended unrecorded, with no record of the nodes that it lost."""
    if status.state is RunState.REQUEUED or status.state.ended:
        return False
    return all(entry.attempt != status.attempt for entry in read_exclusions(run, now_s=now_s))


def _has_last_word(status: RunStatus | None, submission: Submission) -> bool:
    """Return whether the status records the end of the run, regardless of its job.

    Slurm requeues also what failed on the way.
    """
    if status is None or status.attempt <= submission.after_attempt or not status.state.ended:
        return False
    return status.state is RunState.COMPLETED or not submission.requeues or submission.cancelled_by != ""


def _ask(submission: Submission) -> JobFact | None:
    return query_jobs([submission]).get(submission.job_id)


def _job_is_over(job: JobFact | None, submission: Submission | None) -> bool:
    """Return whether no job can begin another attempt. Under Slurm only its answer counts, not its silence."""
    if job is not None:
        return job.ended or job.gone
    return submission is None or submission.executor != "slurm"


def _between(view: RunView, run: RunDir) -> RunView:
    """Return the state of a run without a supervisor whose job has not ended, or is unknown."""
    if view.job is not None and view.job.holding:
        restarts = run.plan().attempts.requeue and view.job.state != "COMPLETING"
        return msgspec.structs.replace(view, state=RunState.REQUEUED if restarts else RunState.STOPPING)
    return view


def _judged_again(run: RunDir, status: RunStatus | None, now_s: float) -> RunView | None:
    """Return the view of a status that was written after ``status`` was read; None where none was.

    A supervisor may write its last one between that and the look at its process or job.
    """
    os.listdir(run.path)  # a client of NFS may remember that there was none; a listing makes it forget
    return None if RunStatus.read(run) == status else observe(run, now_s=now_s)


def _not_started(view: RunView, record: RunRecord) -> RunView | None:
    """Return the state of a member that its sweep has not started; None for all other runs."""
    if record.queued:
        return msgspec.structs.replace(view, state=RunState.QUEUED)
    if record.withdrawn is None or record.submissions:
        return None
    at_s, message = record.withdrawn.time_s, f"cancelled by {record.withdrawn.user} before it was started"
    cause = Cause(kind=CauseKind.CANCELLED, time_s=at_s, message=message)
    return msgspec.structs.replace(view, state=RunState.CANCELLED, ended_at_s=at_s, cause=cause)


def _before_first_word(view: RunView, submission: Submission | None, now_s: float) -> RunView:
    """Return the state of a run whose newest submission no supervisor has answered."""
    if submission is None:
        alive, ended_at_s = now_s - view.created_at_s < _SUBMIT_GRACE_S, view.created_at_s
    else:
        seen = None if submission.process is None else submission.process.alive()
        if submission.executor == "slurm":
            # a job about which Slurm was not asked, or does not answer, may wait in the queue for days
            seen = view.job is None or not (view.job.ended or view.job.gone)
            if not seen and view.job is not None and view.job.gone:
                seen = now_s - submission.submitted_at_s < _KNOWN_GRACE_S
                warning = f"Slurm does not know job {view.job.job_id} yet, which was submitted a moment ago"
                view = msgspec.structs.replace(view, warnings=[warning]) if seen else view
        alive = seen if seen is not None else now_s - submission.submitted_at_s < _SUBMIT_GRACE_S
        ended_at_s = submission.submitted_at_s
    if alive:
        return view
    if submission is not None and submission.cancel_requested_at_s is not None:
        return msgspec.structs.replace(
            view, state=RunState.CANCELLED, ended_at_s=ended_at_s, cause=cancelled_cause(submission)
        )
    if (end := end_by_slurm(view.job, ended_at_s)) is not None:
        return msgspec.structs.replace(view, state=end[0], ended_at_s=end[1].time_s, cause=end[1])
    cause = Cause(
        kind=CauseKind.SUPERVISOR_LOST,
        time_s=ended_at_s,
        message="the supervisor ended before it wrote its status"
        + slurm_words(view.job)
        + (": it was never submitted" if submission is None else log_words(submission)),
    )
    return msgspec.structs.replace(view, state=RunState.LOST, ended_at_s=ended_at_s, cause=cause)
