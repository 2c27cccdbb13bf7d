"""Attempts of a run: whether one more is worth its nodes, and the request to save before one ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import time

import msgspec

from hpcrl.checkpoints.history import read_saved
from hpcrl.checkpoints.ledger import CheckpointLedger
from hpcrl.config.cluster_slurm import SIGNAL_EARLY_S
from hpcrl.config.plan import Plan
from hpcrl.reporting.reports import ReportedFile
from hpcrl.runs.cause import Cause, CauseKind
from hpcrl.runs.events import read_events
from hpcrl.runs.metrics import read_metrics
from hpcrl.runs.record import RunRecord
from hpcrl.runs.reserve import release_reserve
from hpcrl.runs.role import save_answer_path, save_request_path
from hpcrl.runs.rundir import RunDir
from hpcrl.storage.files import atomic_write
from hpcrl.storage.retry import NO_SPACE, retry_transient

_log = logging.getLogger(__name__)

LEAVE_S = 45.0
"""Seconds of the time between Slurm's warning and the end that are reserved to end the roles and to requeue."""
_SAVE_MARGIN = 2.0
_RECENT_STEPS = 50
_POLL_S = 0.2
_RETRIED = frozenset(
    {CauseKind.ERROR, CauseKind.EXIT, CauseKind.EARLY_EXIT, CauseKind.GUARD_LOST, CauseKind.HUNG, CauseKind.STALE}
    | {CauseKind.WRONG_WEIGHTS}
    | {CauseKind.START_TIMEOUT}
)
"""Failures that a new attempt may follow."""


def begin_attempt(run: RunDir, *, limit_s: float) -> tuple[int, float]:
    """Start a new attempt; return its number and for how many seconds its next writes may be retried.

    If the disk is still full after ``limit_s``, the reserve is released and the attempt starts only to report that.
    """
    try:
        return retry_transient(run.start_attempt, limit_s=limit_s, what="the start of an attempt"), limit_s
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        _log.error("there is no space for an attempt: %s", error)
        # no retries with 0 s: the attempt can only report, and has waited already
        release_reserve(run, "start")
        return run.start_attempt(), 0.0


def newest_checkpoint(run: RunDir) -> int | None:
    """Return the step of the newest joint checkpoint, not verified."""
    return max(CheckpointLedger(run.checkpoints_dir).steps(), default=None)


def _savers(run: RunDir) -> set[int]:
    """Return the attempts that have saved a joint checkpoint."""
    return {saved.attempt for saved in read_saved(run.checkpoints_dir)}


def _last_before(run: RunDir) -> int:
    """Return the last attempt before the last submit or resume; 0 if there was none."""
    submissions = RunRecord.read(run).submissions
    return submissions[-1].after_attempt if submissions else 0


def exhausted(run: RunDir, plan: Plan, attempt: int) -> str:
    """Return why this attempt should not be made; empty if it should.

    Only attempts since the last submit or resume count: the person who resumes has decided to try again.
    """
    first = _last_before(run) + 1
    policy = plan.attempts
    if not policy.requeue and not policy.retries:
        return ""
    if attempt - first >= policy.max_attempts:
        return f"the run had {attempt - first} attempts, job.max_attempts are {policy.max_attempts}"
    # an attempt without an event `attempt.started` did not get far enough to show whether the run is stuck
    starts = {event.attempt: event.data["checkpoint_step"] for event in read_events(run, kind="attempt.started")}
    begun = [(number, starts[number]) for number in range(first, attempt) if number in starts]
    recent = dict(begun[-policy.max_without_progress :])
    newest = newest_checkpoint(run)
    # a save counts as progress even if it was later withdrawn or damaged, so that the newest step is unchanged
    stands_still = all(step == newest for step in recent.values()) and not _savers(run) & set(recent)
    if len(recent) == policy.max_without_progress and stands_still:
        where = "before the first checkpoint" if newest is None else f"at the checkpoint of step {newest}"
        return f"{len(recent)} attempts in a row started {where} and made no progress"
    return ""


def has_trained(run: RunDir) -> bool:
    """Return whether an attempt since the last submit or resume has saved a joint checkpoint.

    If so, the recipe works on this cluster.
    """
    return max(_savers(run), default=0) > _last_before(run)


def may_retry(run: RunDir, plan: Plan, *, began_at: int | None) -> bool:
    """Return whether a new attempt may follow the failure of a role.

    It may if this attempt made a joint checkpoint and the number of such retries since the last submit or resume is
    below the limit.

    Parameters
    ----------
    began_at:
        Step of the checkpoint that the attempt began at; None if there was none.
    """
    newest = newest_checkpoint(run)
    further = newest is not None and (began_at is None or newest > began_at)
    # its checkpoint may be older than the newest one, if that was damaged or a person asked for an earlier start
    if not further and (run.attempts() or [0])[-1] not in _savers(run):
        return False
    after = _last_before(run)
    used = sum(event.attempt > after for event in read_events(run, kind="attempt.retried"))
    return used < plan.attempts.retries


def retries(run: RunDir, plan: Plan, cause: Cause | None, *, began_at: int | None) -> bool:
    """Return whether a new attempt may follow an end: its cause may be transient, and `may_retry` allows it."""
    return cause is not None and cause.kind in _RETRIED and may_retry(run, plan, began_at=began_at)


def longest_save_s(run: RunDir) -> float | None:
    """Return the longest duration in seconds of a joint checkpoint's save in this run; None before the first."""
    measured = [float(event.data["seconds"]) for event in read_events(run, kind="trainer.checkpoint_saved")]
    return max(measured, default=None)


def lead_s(run: RunDir, plan: Plan) -> int:
    """Return how many seconds before the end of the job the supervisor must be warned.

    It is the duration of a training step plus twice the longest save, both as measured; before the first save, the
    value of the cluster profile (``limits.save_timeout_s``).
    """
    save_s = longest_save_s(run)
    if save_s is None or not plan.attempts.signal_lead_s:
        return plan.attempts.signal_lead_s
    # the warning may arrive just after a step began: that step, then its save with a margin, must fit
    step_s = max((sum(record.phases_s.values()) for record in read_metrics(run)[-_RECENT_STEPS:]), default=0.0)
    return math.ceil(step_s + _SAVE_MARGIN * save_s + LEAVE_S + SIGNAL_EARLY_S)


def with_measured_lead(run: RunDir, plan: Plan) -> Plan:
    """Return the plan with `lead_s`, and write it to the run directory; called before a job is submitted again."""
    lead = lead_s(run, plan)
    if lead == plan.attempts.signal_lead_s:
        return plan
    plan = plan.model_copy(update={"attempts": plan.attempts.model_copy(update={"signal_lead_s": lead})})
    atomic_write(run.plan_path, plan.model_dump_json(indent=2).encode() + b"\n")
    return plan


async def save_now(run: RunDir, attempt: int, *, timeout_s: float) -> int | None:
    """Request a joint checkpoint from the trainer and wait for it; return its step, or None after the timeout."""
    path, answer = save_request_path(run, attempt), save_answer_path(run, attempt)
    ReportedFile(path).put(msgspec.json.encode({"time_s": time.time(), "pid": os.getpid()}))
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        # transient errors of the filesystem, and an answer that is only partly visible yet, are retried
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            # a listing, because an NFS client may remember for a minute that a name did not exist
            if answer.name in await asyncio.to_thread(os.listdir, answer.parent):
                step: int | None = msgspec.json.decode(await asyncio.to_thread(answer.read_bytes))["step"]
                return step
        await asyncio.sleep(_POLL_S)
    return None
