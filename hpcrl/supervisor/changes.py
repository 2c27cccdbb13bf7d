"""What an attempt would run, against what was submitted (`hpcrl.runs.start.snapshot`)."""

from __future__ import annotations

import logging

from hpcrl.config.plan import Plan
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.start.snapshot import changes_since_submit
from hpcrl.supervisor.board import Board

__all__ = ["say_changes"]

_log = logging.getLogger(__name__)


def say_changes(run: RunDir, plan: Plan, board: Board) -> str:
    """Say in an event what has changed since a person submitted or resumed; why the attempt must end, or empty."""
    try:
        changes = changes_since_submit(run)
    except (OSError, ValueError) as error:
        # for people: a run must not end because it cannot be said
        _log.warning("what has changed since the submit is not known: %s", error)
        return ""
    if not changes:
        return ""
    stops = plan.attempts.on_change == "stop"
    board.emit("attempt.changed", changes=changes, stops=stops)
    return "; ".join(changes) if stops else ""
