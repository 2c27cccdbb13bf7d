"""What ends an attempt from outside of its roles: signals to the supervisor, and Slurm's warning before it ends us."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Sequence

from hpcrl.config.plan import Plan
from hpcrl.runs.cause import CauseKind
from hpcrl.runs.record import RunRecord
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ComponentState
from hpcrl.supervisor.attempts import LEAVE_S, lead_s, save_now
from hpcrl.supervisor.board import Board
from hpcrl.supervisor.component import Component

__all__ = ["Notices"]

_LEAST_SAVE_S = 5.0


class Notices:
    """Signals of one attempt, and the save that a warning asks for.

    Parameters
    ----------
    decided:
        Set when the attempt is to end; we set it, too.
    fail:
        Ends the run with a cause.
    on_bug:
        Told of each task of ours that ends.
    in_step:
        Whether Slurm may be who sends signals.

    Attributes
    ----------
    requeue:
        The attempt ends for the next one.
    saving:
        A warning was taken; nothing after it changes how the attempt ends.
    cancelled_by_person, asked_by_slurm:
        Who asked for the end.
    hurry:
        Set when somebody does not want to wait.
    """

    def __init__(
        self,
        run: RunDir,
        *,
        attempt: int,
        plan: Plan,
        board: Board,
        components: Sequence[Component],
        decided: asyncio.Event,
        fail: Callable[[CauseKind, str], None],
        on_bug: Callable[[asyncio.Task[None]], None],
        in_step: bool,
    ) -> None:
        self._run, self._attempt, self._plan, self._board = run, attempt, plan, board
        self._components, self._decided, self._fail, self._on_bug = components, decided, fail, on_bug
        self._in_step = in_step
        self._task: asyncio.Task[None] | None = None
        self.requeue = False
        self.cancelled_by_person = False
        self.asked_by_slurm = False
        self.hurry = asyncio.Event()

    @property
    def saving(self) -> bool:
        return self._task is not None

    def listen(self) -> None:
        """Handle signals from now on."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._cancel, signum)
        loop.add_signal_handler(signal.SIGUSR2, self._warned)

    async def look_at_clock(self, elapsed_s: float) -> None:
        """Whether it is time to save: a save that takes longer than Slurm's warning comes early must begin before it,
        and where no warning comes at all, the clock is it.

        Parameters
        ----------
        elapsed_s:
            Of the job's time limit.
        """
        policy = self._plan.attempts
        if policy.signal_lead_s and policy.saves and not self.saving:
            lead = await asyncio.to_thread(lead_s, self._run, self._plan)
            first = lead > policy.signal_lead_s or not policy.signalled
            if first and elapsed_s > self._plan.time_limit_s - lead:
                self._warned()

    def _cancel(self, signum: int) -> None:
        """The first signal stops in order, the second at once."""
        if self._decided.is_set():
            self.hurry.set()
            return
        submissions = RunRecord.read(self._run).submissions
        by = submissions[-1].cancelled_by if submissions else ""
        self.cancelled_by_person = by != ""
        self.asked_by_slurm = not by and self._in_step
        # who asks through hpcrl says so in the record first; Slurm and kill do not
        who = f"by {by}" if by else f"by {signal.Signals(signum).name} to the supervisor"
        self._fail(CauseKind.CANCELLED, f"cancelled {who}")

    def _warned(self) -> None:
        """Slurm's early warning of the time limit or of a preemption: save, and go on in the next attempt."""
        self._board.emit("supervisor.warned")
        if not self.saving and not self._decided.is_set():
            self._task = asyncio.create_task(self._save_and_leave(), name="save")
            self._task.add_done_callback(self._on_bug)

    async def _save_and_leave(self) -> None:
        policy, step = self._plan.attempts, None
        trains = any(c.group.policy.ends_run and c.state is ComponentState.READY for c in self._components)
        if trains and policy.saves:
            started = time.monotonic()
            lead = await asyncio.to_thread(lead_s, self._run, self._plan)
            timeout_s = max(max(lead, policy.signal_lead_s) - LEAVE_S, _LEAST_SAVE_S)
            step = await save_now(self._run, self._attempt, timeout_s=timeout_s)
            self._board.emit("supervisor.saved", step=step, seconds=time.monotonic() - started)
        if self._decided.is_set():
            return
        if policy.requeue:
            self.requeue = True
            self._decided.set()
            return
        saved = "nothing could be saved" if step is None else f"the state of step {step} was saved"
        ends = "Slurm warned that the job is about to end" if policy.signalled else "the allocation is about to end"
        self._fail(CauseKind.TIME_LIMIT, f"{ends}; {saved}")
