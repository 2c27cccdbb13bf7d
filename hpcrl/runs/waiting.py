"""Waiting until a run has come to a state."""

from __future__ import annotations

import time
from collections.abc import Callable

from hpcrl.errors import HpcrlError
from hpcrl.runs.observe import RunView, observe
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunState

_FIRST_POLL_S, _LAST_POLL_S = 0.5, 10.0


class WaitTimeoutError(HpcrlError):
    """Raised where a run has not reached the state in time; nothing was changed."""


def wait_for_state(
    run: RunDir,
    *,
    running: bool = False,
    timeout_s: float | None = None,
    told: Callable[[RunView], None] = lambda view: None,
) -> RunView:
    """Wait until a run has ended; return its state then.

    Parameters
    ----------
    running:
        Wait until all of its roles are ready, or it has ended.
    timeout_s:
        Maximum wait in seconds; None: without limit.
    told:
        Called with the first state and with each that follows.

    Raises
    ------
    WaitTimeoutError
        After ``timeout_s``.
    RunDirError
        The directory is not a run.
    """
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    last: tuple[RunState, int] | None = None
    poll_s = _FIRST_POLL_S
    while True:
        view = observe(run)
        if (view.state, view.attempt) != last:
            last, poll_s = (view.state, view.attempt), _FIRST_POLL_S
            told(view)
        if view.state.ended or (running and view.state is RunState.RUNNING):
            return view
        left_s = float("inf") if deadline_s is None else deadline_s - time.monotonic()
        if left_s <= 0:
            wanted = "is not ready" if running else "has not ended"
            raise WaitTimeoutError(f"{run.name} {wanted} within {timeout_s:g} s: it is {view.state}")
        time.sleep(min(poll_s, left_s))
        # a long run is polled less often than one that is about to start
        poll_s = min(_LAST_POLL_S, poll_s * 1.5)
