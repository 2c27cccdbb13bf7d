"""State of one attempt and the decision how it ends: observers report events here, others read the result.

::

    STARTING ──> RUNNING          `running`: all roles were ready once
        └───────────┴──> STOPPING `stop`: the end was decided, by `complete`, `fail`, `cancel` or `leave`
                            └──> COMPLETED, FAILED, CANCELLED or REQUEUED    `conclude`
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from hpcrl.runs.cause import Cause, CauseKind
from hpcrl.runs.status import RunState
from hpcrl.supervisor.status.status_writer import StatusWriter

_NEXT = {
    RunState.STARTING: {RunState.RUNNING, RunState.STOPPING},
    RunState.RUNNING: {RunState.STOPPING},
    RunState.STOPPING: {RunState.COMPLETED, RunState.FAILED, RunState.CANCELLED, RunState.REQUEUED},
}
_MOVES = frozenset({CauseKind.NODE_FAIL, CauseKind.PREEMPTED, CauseKind.NO_STEP})
"""Causes that took away nodes or their use: the run continues on others, when Slurm has some."""


class AttemptState:
    """The state of one attempt; see the module.

    Parameters
    ----------
    board:
        Shows the state.
    clock:
        Monotonic seconds.

    Attributes
    ----------
    state:
        See the picture.
    ends:
        Causes that were seen of the end: unrequested ends of roles, deadlines, errors of the supervisor itself.
    broken:
        Nodes on which a role failed as it does on broken hardware, with the reason of each.
    began_at:
        Step of the checkpoint that the attempt began at; None where there was none.
    requeue:
        The attempt ends for the next one of the same job.
    why:
        Reason for the requeue, for people; empty if there is none.
    moves:
        Whether the run continues on other nodes.
    replaced:
        Fields of the event ``nodes.replaced`` where spare nodes take the place of lost ones and the next attempt begins
        at once in the same job; empty otherwise.
    saving:
        A warning was taken; nothing after it changes how the attempt ends.
    cancelled_by_person, asked_by_slurm:
        Whether a person, or Slurm, asked for the end.
    hurry:
        Set when the end must not wait any longer.
    """

    def __init__(self, board: StatusWriter, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._board, self._clock = board, clock
        self._decided = asyncio.Event()
        self._ends_at: float | None = None
        self.state = RunState.STARTING
        self.ends: list[Cause] = []
        self.broken: dict[str, str] = {}
        self.began_at: int | None = None
        self.requeue, self.why, self.moves, self.saving = False, "", False, False
        self.replaced: Mapping[str, object] = {}
        self.cancelled_by_person = self.asked_by_slurm = False
        self.hurry = asyncio.Event()

    def is_decided(self) -> bool:
        """Return whether the end of the attempt is decided."""
        return self._decided.is_set()

    async def wait_decided(self) -> None:
        """Return when the attempt is to end."""
        await self._decided.wait()

    @property
    def left_s(self) -> float | None:
        """Return the seconds until Slurm kills the supervisor; None if no kill is known."""
        return None if self._ends_at is None else max(0.0, self._ends_at - self._clock())

    # -- what ends the attempt ---------------------------------------------------------------------------------

    def complete(self) -> None:
        """End the attempt: the roles that end the run have completed their work."""
        self._decided.set()

    def fail(self, *causes: Cause) -> None:
        """End the attempt with the first error among ``causes`` and those found until it ends (`hpcrl.runs.cause`)."""
        self.ends.extend(causes)
        self._decided.set()

    def add_node_faults(self, nodes: Mapping[str, str]) -> None:
        """Record nodes on which a role failed as roles do on broken hardware, with the words of its log."""
        self.broken |= nodes

    def cancel(self, *, killed_within_s: float | None) -> bool:
        """Handle a termination signal. Return False if the attempt is already ending: a second signal hurries the end.

        Parameters
        ----------
        killed_within_s:
            Seconds until Slurm kills the supervisor, if Slurm may have sent the signal; None if it did not.
        """
        if self.is_decided():
            self.hurry.set()
            return False
        self._decided.set()
        self.asked_by_slurm = killed_within_s is not None
        self._ends_by(killed_within_s)
        return True

    def cancelled(self, cause: Cause, *, by_person: bool) -> None:
        """Record who sent the signal; after ``hpcrl cancel`` by a person no attempt follows."""
        self.cancelled_by_person = by_person
        if by_person:
            self.asked_by_slurm, self._ends_at = False, None
        self.fail(cause)

    def warn(self, left_s: float | None) -> bool:
        """Request a checkpoint before the job ends in ``left_s`` seconds. Return False if it is too late for that."""
        if self.saving or self.is_decided():
            return False
        self.saving = True
        self._ends_by(left_s)
        return True

    def leave(self, why: str) -> None:
        """End the attempt so that another one of the same job follows."""
        self.requeue, self.why = True, why
        self._decided.set()

    def _ends_by(self, left_s: float | None) -> None:
        self._ends_at = None if left_s is None else self._clock() + left_s

    # -- states ------------------------------------------------------------------------------------------------

    def running(self) -> None:
        """Enter the state RUNNING once, when all roles are ready."""
        if self.state is RunState.STARTING:
            self._enter(RunState.RUNNING)

    def stop(self, cause: Cause | None) -> None:
        """Enter the state STOPPING, in which roles are drained; ``cause`` is the first cause, None if none is known."""
        assert self.is_decided(), "an attempt stops for a reason"
        self._enter(RunState.STOPPING, cause)

    def outlook(self, cause: Cause | None, *, retries: Callable[[Cause | None], bool]) -> tuple[RunState, bool]:
        """Return the last state of the attempt as `conclude` would enter it now, and whether the next one begins."""
        if cause is not None and self._replaces_nodes():
            return RunState.FAILED, True
        return self._last_state(cause, retries)

    def _last_state(self, cause: Cause | None, retries: Callable[[Cause | None], bool]) -> tuple[RunState, bool]:
        """Return what `outlook` does where no spare nodes replace lost ones."""
        last = RunState.COMPLETED
        if (self.moves or self.requeue) and (cause is None or cause.kind in _MOVES or self.broken):
            last = RunState.REQUEUED
        elif cause is not None:
            last = RunState.CANCELLED if cause.kind is CauseKind.CANCELLED else RunState.FAILED
        return last, last is RunState.FAILED and not self._over and retries(cause)

    @property
    def _over(self) -> bool:
        return self.hurry.is_set() or self.saving

    def _replaces_nodes(self) -> bool:
        return bool(self.replaced) and not self._over and not self.asked_by_slurm

    def conclude(self, cause: Cause | None, *, retries: Callable[[Cause | None], bool]) -> bool:
        """Enter the last state; returns whether the next attempt begins at once.

        Parameters
        ----------
        cause:
            Cause of the failure; None if nothing failed.
        retries:
            Whether the run begins again after a failure.
        """
        if cause is not None and self._replaces_nodes():
            message = f"{cause.message}; the next attempt begins at once, on the other nodes of the job"
            self._board.emit("nodes.replaced", cause=message, **self.replaced)
            self._end_for_next(message)
            return True
        last, again = self._last_state(cause, retries)
        if again:
            self._board.emit("attempt.retried", cause=cause.message if cause else "")
            self._end_for_next(cause.message if cause else "")
        else:
            # an attempt that ends without a failure: `hpcrl why` shows the reason
            self._enter(last, cause, because=self.why if last is RunState.REQUEUED else "")
        return again

    def _end_for_next(self, message: str) -> None:
        """End the attempt by an event, not as a state of the run: observers continue with the next attempt."""
        self._check(RunState.FAILED)
        self.state = RunState.FAILED
        self._board.emit("run.state", state=RunState.FAILED, cause=message)

    def _enter(self, state: RunState, cause: Cause | None = None, *, because: str = "") -> None:
        self._check(state)
        self.state = state
        self._board.enter(state, cause, because=because)

    def _check(self, state: RunState) -> None:
        assert state in _NEXT.get(self.state, ()), f"an attempt cannot go from {self.state} to {state}"
