"""State of a run that is over, and whose supervisor has recorded no end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from hpcrl.runs.cause import Cause, CauseKind
from hpcrl.runs.events import read_events
from hpcrl.runs.job_end import end_by_slurm, slurm_words
from hpcrl.runs.record import Submission
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ComponentState, RunState

if TYPE_CHECKING:
    from hpcrl.runs.observe import RunView

_LAST_WORD_S = 60.0
"""Time in seconds after the end of a job for which the last status of a supervisor on another machine may not be
visible here: clients of NFS keep attributes for up to a minute."""


def cancelled_cause(submission: Submission) -> Cause:
    """Return the cause of a run whose cancel was requested."""
    assert submission.cancel_requested_at_s is not None
    return Cause(
        kind=CauseKind.CANCELLED,
        time_s=submission.cancel_requested_at_s,
        message=f"cancelled by {submission.cancelled_by}",
    )


def view_without_end(view: RunView, run: RunDir, submission: Submission | None, now_s: float) -> RunView:
    """Return the state of a run whose supervisor is gone without recording an end. Its guards say when they noticed.

    A run whose job has just ended is ``STOPPING``, with a warning, as long as its last status may not be visible here.
    """
    noticed = [event.time_s for event in read_events(run, attempt=view.attempt, kind="guard.supervisor_lost")]
    assert view.heartbeat_s is not None
    ended_at_s = min(noticed, default=view.heartbeat_s)
    components = [
        component if component.state.ended else msgspec.structs.replace(component, state=ComponentState.LOST)
        for component in view.components
    ]
    if submission is not None and submission.cancel_requested_at_s is not None:
        state, cause = RunState.CANCELLED, cancelled_cause(submission)
    elif view.cause is not None:  # it was stopping already, and had recorded the cause
        state = RunState.CANCELLED if view.cause.kind is CauseKind.CANCELLED else RunState.FAILED
        cause = view.cause
    elif (end := end_by_slurm(view.job, ended_at_s)) is not None:
        state, cause = end
    elif (unseen := _last_status_unseen(view, now_s)) is not None:
        return unseen
    else:
        state = RunState.LOST
        cause = Cause(
            kind=CauseKind.SUPERVISOR_LOST,
            time_s=ended_at_s,
            message=f"the supervisor (pid {view.pid} on {view.host}) ended without a final status: "
            + (
                "it was killed, and the guards ended the roles"
                if noticed
                else "it was killed, or the machine went down"
            )
            + slurm_words(view.job),
        )
    return msgspec.structs.replace(view, state=state, cause=cause, ended_at_s=ended_at_s, components=components)


def _last_status_unseen(view: RunView, now_s: float) -> RunView | None:
    """Return the state of a run whose last status may not be visible yet; None where it would be by now."""
    job = view.job
    if job is None or job.end_s is None or now_s - job.end_s >= _LAST_WORD_S:
        return None
    if view.supervisor is None or view.supervisor.alive() is not None:
        return None  # it wrote on this machine
    warning = f"job {job.job_id} has ended ({job.state}), and the supervisor's last status is not visible here yet"
    return msgspec.structs.replace(view, state=RunState.STOPPING, warnings=[*view.warnings, warning])
