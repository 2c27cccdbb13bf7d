"""A living run as it is seen from outside, and how it is waited for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psutil
from process_words import words_of

from fault_trials.places import rank_number
from hpcrl.checkpoints import CheckpointLedger
from hpcrl.runs.events import Event, read_events
from hpcrl.runs.metrics import read_metrics
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunState, RunStatus

OVER = ("COMPLETED", "FAILED", "LOST", "CANCELLED")
ENDED = (*OVER, "refused")
#: events by which somebody notices a fault
NOTICED = (
    "component.hung",
    "component.restarting",
    "guard.supervisor_lost",
    "supervisor.warned",
    "reports.caught_up",
    "trainer.checkpoint_failed",
)
LIMIT_S = 300.0
"""Longest wait for any one consequence."""


def is_end(event: Event) -> bool:
    """Whether an event says that something ended which was not to."""
    if event.kind == "component.state":
        return bool(event.data["state"] == "FAILED")
    return event.kind == "run.state" and event.data["state"] == "STOPPING"


def is_rank(process: psutil.Process) -> bool:
    """Whether it is a worker of the trainer, not its launcher."""
    return rank_number(process) is not None


def status(run: RunDir) -> RunStatus:
    """What the supervisor says."""
    found = RunStatus.read(run)
    assert found is not None
    return found


def wait_for(probe: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
    """Poll until ``probe`` gives something; None where it does not in time."""
    deadline = time.monotonic() + limit_s
    while not (value := probe()):
        if time.monotonic() > deadline:
            return None
        time.sleep(0.25)
    return value


def is_sandboxd(process: psutil.Process) -> bool:
    """Whether it is a daemon of sandboxes."""
    return "hpcrl.sandboxes.daemon" in words_of(process)


def ready_for_fault(run: RunDir, *, after: int = 3) -> bool:
    """Running, with more steps than ``after`` and a checkpoint of its own: a failure before is rightly not retried."""
    now = status(run)
    started = read_events(run, attempt=now.attempt, kind="attempt.started")
    if now.state is not RunState.RUNNING or not started or any(c.state != "READY" for c in now.components):
        return False
    began_at = started[0].data["checkpoint_step"] or 0
    steps = [s.step for s in read_metrics(run) if s.attempt == now.attempt]
    return len(steps) > after and max(CheckpointLedger(run.checkpoints_dir).steps(), default=0) > began_at
