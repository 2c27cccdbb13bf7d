"""Attempts of a run: whether one more is worth its nodes, and the request to save before one ends."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from hpcrl.checkpoints.ledger import CheckpointLedger
from hpcrl.config.plan import Plan
from hpcrl.fs import write_json
from hpcrl.runs.events import read_events
from hpcrl.runs.record import RunRecord
from hpcrl.runs.role import save_request_path
from hpcrl.runs.rundir import RunDir

__all__ = ["exhausted", "newest_checkpoint", "save_now"]

_POLL_S = 0.2


def newest_checkpoint(run: RunDir) -> int | None:
    """Step of the newest joint checkpoint, not verified."""
    return max(CheckpointLedger(run.checkpoints_dir).steps(), default=None)


def exhausted(run: RunDir, plan: Plan, attempt: int) -> str:
    """Why this attempt should not be made; empty where it should.

    Only attempts since the last submit or resume count: a person who resumes knows why.
    """
    submissions = RunRecord.read(run).submissions
    first = (submissions[-1].after_attempt if submissions else 0) + 1
    policy = plan.attempts
    if not policy.requeue:
        return ""
    if attempt - first >= policy.max_attempts:
        return f"the run had {attempt - first} attempts, job.max_attempts are {policy.max_attempts}"
    starts = {event.attempt: event.data["checkpoint_step"] for event in read_events(run, kind="attempt.started")}
    begun = [starts[number] for number in range(first, attempt) if number in starts]
    recent = begun[-policy.max_without_progress :]
    newest = newest_checkpoint(run)
    if len(recent) == policy.max_without_progress and all(step == newest for step in recent):
        where = "before the first checkpoint" if newest is None else f"at the checkpoint of step {newest}"
        return f"{len(recent)} attempts in a row began {where} and came no further"
    return ""


async def save_now(run: RunDir, attempt: int, *, timeout_s: float) -> int | None:
    """Ask the trainer for a joint checkpoint after its step, and wait for it; its step, or None where none came."""
    before = set(CheckpointLedger(run.checkpoints_dir).steps())
    path: Path = save_request_path(run, attempt)
    await asyncio.to_thread(write_json, path, {"time_s": time.time(), "pid": os.getpid()})
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        fresh = set(CheckpointLedger(run.checkpoints_dir).steps()) - before
        if fresh:
            return max(fresh)
        await asyncio.sleep(_POLL_S)
    return None
