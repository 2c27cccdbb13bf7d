"""How far one attempt is, and all that decides how it ends: whoever sees something says it here, and the others ask.

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
from hpcrl.supervisor.board import Board

__all__ = ["AttemptState"]

_NEXT = {
    RunState.STARTING: {RunState.RUNNING, RunState.STOPPING},
    RunState.RUNNING: {RunState.STOPPING},
    RunState.STOPPING: {RunState.COMPLETED, RunState.FAILED, RunState.CANCELLED, RunState.REQUEUED},
}
_MOVES = frozenset({CauseKind.NODE_FAIL, CauseKind.PREEMPTED, CauseKind.NO_STEP})
"""What took nodes from us, or the use of them: the run goes on with others, when Slurm has some."""


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
        What was seen that ends the attempt: ends of roles nobody had asked to stop, deadlines, our own troubles.
    broken:
        Nodes on which a role failed as it does on broken hardware, with the reason of each.
    began_at:
        Step of the checkpoint that the attempt began at; None where there was none.
    requeue:
        The attempt ends for the next one of the same job.
    why:
        Why it does, for people; empty where it does not.
    moves:
        The run goes on with other nodes.
    saving:
        A warning was taken; nothing after it changes how the attempt ends.
    cancelled_by_person, asked_by_slurm:
        Who asked for the end.
    hurry:
        Set when somebody does not want to wait.
    """

    def __init__(self, board: Board, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._board, self._clock = board, clock
        self._decided = asyncio.Event()
        self._ends_at: float | None = None
        self.state = RunState.STARTING
        self.ends: list[Cause] = []
        self.broken: dict[str, str] = {}
        self.began_at: int | None = None
        self.requeue, self.why, self.moves, self.saving = False, "", False, False
        self.cancelled_by_person = self.asked_by_slurm = False
        self.hurry = asyncio.Event()

    def is_decided(self) -> bool:
        """The attempt is to end."""
        return self._decided.is_set()

    async def wait_decided(self) -> None:
        """Return when the attempt is to end."""
        await self._decided.wait()

    @property
    def left_s(self) -> float | None:
        """Seconds until Slurm ends us by force; None where nothing says so."""
        return None if self._ends_at is None else max(0.0, self._ends_at - self._clock())

    # -- what ends the attempt ---------------------------------------------------------------------------------

    def complete(self) -> None:
        """The roles that end the run have done their work."""
        self._decided.set()

    def fail(self, *causes: Cause) -> None:
        """The attempt ends with the first of these and of what else is seen until then (`hpcrl.runs.cause`)."""
        self.ends.extend(causes)
        self._decided.set()

    def add_node_faults(self, nodes: Mapping[str, str]) -> None:
        """A role failed as it does on broken hardware."""
        self.broken |= nodes

    def cancel(self, *, killed_within_s: float | None) -> bool:
        """A signal asks for the end; False where that was decided: the second signal is of somebody in a hurry.

        Parameters
        ----------
        killed_within_s:
            Slurm may be who asks, and then ends us by force after so long; None: it is not.
        """
        if self.is_decided():
            self.hurry.set()
            return False
        self._decided.set()
        self.asked_by_slurm = killed_within_s is not None
        self._ends_by(killed_within_s)
        return True

    def cancelled(self, cause: Cause, *, by_person: bool) -> None:
        """Who asked for the end: of a person's signal by ``hpcrl cancel`` nothing follows."""
        self.cancelled_by_person = by_person
        if by_person:
            self.asked_by_slurm, self._ends_at = False, None
        self.fail(cause)

    def warn(self, left_s: float | None) -> bool:
        """The end of the job is near, ``left_s`` seconds from now: save first. False where it is too late for that."""
        if self.saving or self.is_decided():
            return False
        self.saving = True
        self._ends_by(left_s)
        return True

    def leave(self, why: str) -> None:
        """The attempt ends for the next one of the same job."""
        self.requeue, self.why = True, why
        self._decided.set()

    def _ends_by(self, left_s: float | None) -> None:
        self._ends_at = None if left_s is None else self._clock() + left_s

    # -- states ------------------------------------------------------------------------------------------------

    def running(self) -> None:
        """All roles are ready; it counts once."""
        if self.state is RunState.STARTING:
            self._enter(RunState.RUNNING)

    def stop(self, cause: Cause | None) -> None:
        """The roles are drained from now on; ``cause`` is what is known of why."""
        assert self.is_decided(), "an attempt stops for a reason"
        self._enter(RunState.STOPPING, cause)

    def conclude(self, cause: Cause | None, *, retries: Callable[[Cause | None], bool]) -> bool:
        """Enter the last state; returns whether the next attempt begins at once.

        Parameters
        ----------
        cause:
            Why the attempt failed; None where nothing failed.
        retries:
            Whether the run begins again after a failure.
        """
        last = RunState.COMPLETED
        if (self.moves or self.requeue) and (cause is None or cause.kind in _MOVES or self.broken):
            last = RunState.REQUEUED
        elif cause is not None:
            last = RunState.CANCELLED if cause.kind is CauseKind.CANCELLED else RunState.FAILED
        over = self.hurry.is_set() or self.saving
        again = last is RunState.FAILED and not over and retries(cause)
        if again:
            self._check(last)
            self.state = last
            self._board.emit("attempt.retried", cause=cause.message if cause else "")
            # not written as an end: whoever follows the run sees the next attempt
            self._board.emit("run.state", state=last, cause=cause.message if cause else "")
        else:
            # of an attempt that failed in nothing, for `hpcrl why`
            self._enter(last, cause, because=self.why if last is RunState.REQUEUED else "")
        return again

    def _enter(self, state: RunState, cause: Cause | None = None, *, because: str = "") -> None:
        self._check(state)
        self.state = state
        self._board.enter(state, cause, because=because)

    def _check(self, state: RunState) -> None:
        assert state in _NEXT.get(self.state, ()), f"an attempt cannot go from {self.state} to {state}"
