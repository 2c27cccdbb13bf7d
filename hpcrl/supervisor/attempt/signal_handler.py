"""Reasons outside of its roles that end an attempt: signals to the supervisor, and Slurm's warning before a kill."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial

from hpcrl.config.plan import Plan
from hpcrl.processes.signals import handle_signals
from hpcrl.runs.cause import Cause, CauseKind
from hpcrl.runs.record import RunRecord
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ComponentState
from hpcrl.supervisor.attempt.attempt_state import AttemptState
from hpcrl.supervisor.recovery.attempts import LEAVE_S, lead_s, save_now
from hpcrl.supervisor.replicas.component import Component
from hpcrl.supervisor.status.status_writer import StatusWriter

_log = logging.getLogger(__name__)
_LEAST_SAVE_S = 5.0
_WHO_S = 3.0
"""Timeout in seconds for reading from the record who cancelled the run."""
_KILL_WAIT_S = 30.0
"""Seconds between Slurm's SIGTERM and its SIGKILL: its ``KillWait`` by default."""


class SignalHandler:
    """Signals of one attempt, and the save that a warning asks for.

    Parameters
    ----------
    state:
        State of the attempt: requests for its end are recorded there, and other decisions read from it.
    on_bug:
        Called with each background task that ends.
    in_step:
        Whether signals may come from Slurm.
    taken:
        Asks Slurm what becomes of the job (`hpcrl.supervisor.launch.replica_launcher.Launcher.taken`).
    """

    def __init__(
        self,
        run: RunDir,
        *,
        attempt: int,
        plan: Plan,
        board: StatusWriter,
        components: Sequence[Component],
        state: AttemptState,
        on_bug: Callable[[asyncio.Task[None]], None],
        in_step: bool,
        taken: Callable[[], tuple[CauseKind, str] | None] = lambda: None,
    ) -> None:
        self._run, self._attempt, self._plan, self._board = run, attempt, plan, board
        self._components, self._state, self._on_bug = components, state, on_bug
        self._in_step, self._taken = in_step, taken
        self._task: asyncio.Task[None] | None = None
        self._naming: asyncio.Task[None] | None = None

    def listen(self) -> None:
        """Handle signals from now on."""
        handle_signals(
            {
                signal.SIGTERM: partial(self._cancel, signal.SIGTERM),
                signal.SIGINT: partial(self._cancel, signal.SIGINT),
                signal.SIGUSR2: self._warned,
            }
        )

    async def look_at_clock(self, elapsed_s: float) -> None:
        """Start a save if it is due by the clock.

        That is the case if a save takes longer than the time between Slurm's warning and the end of the job, or if
        Slurm sends no warning.

        Parameters
        ----------
        elapsed_s:
            Seconds of the job's time limit that have passed.
        """
        policy = self._plan.attempts
        if policy.signal_lead_s and policy.saves and not self._state.saving:
            lead = await asyncio.to_thread(self._lead_s)
            left_s = self._plan.time_limit_s - elapsed_s
            first = lead > policy.signal_lead_s or not policy.signalled
            if first and left_s < lead:
                self._warned(left_s)

    async def settle(self) -> None:
        """Wait briefly until it is known who sent a signal."""
        if self._naming is not None:
            await self._naming

    def _cancel(self, signum: int) -> None:
        """Handle a termination signal: the first one stops the run in order, the second one at once."""
        # first of all: whatever fails below, the signal is not lost
        if not self._state.cancel(killed_within_s=_KILL_WAIT_S if self._in_step else None):
            return
        self._naming = asyncio.create_task(self._find_who(signum, time.time()), name="who cancels")

    async def _find_who(self, signum: int, time_s: float) -> None:
        """Record who cancelled the run; only ``hpcrl cancel`` writes its user to the record, before the signal."""
        by = ""
        try:
            async with asyncio.timeout(_WHO_S):
                record = await asyncio.to_thread(RunRecord.read, self._run)
            by = record.submissions[-1].cancelled_by if record.submissions else ""
        except Exception as error:  # noqa: BLE001 - the run ends all the same
            _log.warning("the user who cancelled the run is unknown, because its record cannot be read: %r", error)
        who = f"by {by}" if by else f"by {signal.Signals(signum).name} to the supervisor"
        cause = Cause(kind=CauseKind.CANCELLED, time_s=time_s, message=f"cancelled {who}")
        self._state.cancelled(cause, by_person=by != "")

    def _warned(self, left_s: float | None = None) -> None:
        """Handle Slurm's early warning of the time limit or of a preemption: save, then continue in the next attempt.

        Parameters
        ----------
        left_s:
            Until the end; what the job was submitted with by default.
        """
        lead_s = float(self._plan.attempts.signal_lead_s) or None
        if self._state.warn(lead_s if left_s is None else left_s):
            self._task = asyncio.create_task(self._save_and_leave(), name="save")
            self._task.add_done_callback(self._on_bug)
        self._board.emit("supervisor.warned")

    async def _save_and_leave(self) -> None:
        policy, step = self._plan.attempts, None
        asking = asyncio.create_task(self._ask_why(), name="the reason of the signal")
        trains = any(c.group.policy.ends_run and c.state is ComponentState.READY for c in self._components)
        if trains and policy.saves:
            started = time.monotonic()
            lead = await asyncio.to_thread(self._lead_s)
            timeout_s = max(max(lead, policy.signal_lead_s) - LEAVE_S, _LEAST_SAVE_S)
            step = await save_now(self._run, self._attempt, timeout_s=timeout_s)
            self._board.emit("supervisor.saved", step=step, seconds=time.monotonic() - started)
        if self._state.is_decided():
            return
        saved = "no state was saved" if step is None else f"the state of step {step} was saved"
        if policy.requeue:
            self._state.leave(f"{await asking}; {saved}")
            return
        ends = "Slurm warned that the job is about to end" if policy.signalled else "the allocation is about to end"
        self._state.fail(Cause(kind=CauseKind.TIME_LIMIT, time_s=time.time(), message=f"{ends}; {saved}"))

    async def _ask_why(self) -> str:
        """Return why Slurm warned: it sends the same signal before a preemption and before the time limit."""
        said = "Slurm warned that the job is about to end (its time limit, or a preemption)"
        if self._in_step:
            try:
                async with asyncio.timeout(_WHO_S):
                    taken = await asyncio.to_thread(self._taken)
            except Exception as error:  # noqa: BLE001 - only a word less
                _log.warning("the reason for the end of the job is unknown: %r", error)
                taken = None
            if taken is not None and taken[0] is CauseKind.PREEMPTED:
                said = taken[1]
        return said

    def _lead_s(self) -> int:
        """Return `lead_s`, or the value that the job was submitted with if measurements cannot be read now."""
        try:
            return lead_s(self._run, self._plan)
        except OSError as error:
            _log.warning("the duration of a save cannot be read now: %s", error)
            return self._plan.attempts.signal_lead_s
