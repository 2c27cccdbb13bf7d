"""Compares what an attempt would run with what was submitted (`hpcrl.runs.start.snapshot`)."""

from __future__ import annotations

import logging

from hpcrl.config.plan import Plan
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.start.snapshot import changes_since_submit
from hpcrl.supervisor.status.status_writer import StatusWriter

_log = logging.getLogger(__name__)


def say_changes(run: RunDir, plan: Plan, board: StatusWriter) -> str:
    """Emit an event with changes since the last submit or resume; return why the attempt must end, or empty."""
    try:
        changes = changes_since_submit(run)
    except (OSError, ValueError) as error:
        # this is for people: an attempt must not end because its event cannot be written
        _log.warning("changes since the submit are unknown: %s", error)
        return ""
    if not changes:
        return ""
    stops = plan.attempts.on_change == "stop"
    board.emit("attempt.changed", changes=changes, stops=stops)
    return "; ".join(changes) if stops else ""
