"""Periodic checks of the supervisor while an attempt runs, other than for ends of roles.

A check that fails because of the filesystem reports nothing and is repeated: it does not end the run.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence

from hpcrl.config.plan import Plan
from hpcrl.runs.cause import Cause, CauseKind
from hpcrl.runs.role import Complaint, FailureRecord
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ComponentState
from hpcrl.supervisor.attempt.attempt_state import AttemptState
from hpcrl.supervisor.attempt.replica import ReplicaRunner
from hpcrl.supervisor.attempt.signal_handler import SignalHandler
from hpcrl.supervisor.recovery.verdict import current_records, slow_failures
from hpcrl.supervisor.replicas.component import Component
from hpcrl.supervisor.status.status_writer import StatusWriter

_log = logging.getLogger(__name__)
_TICK_S = 0.25
_LAST_WORD_S = 2.0
"""A role that wrote a failure record has this long to end before the run is failed in its name: a launcher of
ranks may wait half a minute for ranks that hang."""
_LOOK_S = 2.0
"""Seconds between two looks at whether it is time to save."""


class AttemptMonitor:
    """Heartbeat, time limit, parent, complaints, words of roles that fail slowly.

    Parameters
    ----------
    started:
        Time at which the time limit began to run (monotonic).
    state:
        Receives causes that end the attempt; once the end is decided, only the heartbeat continues.
    on_bug:
        Called with each background task that ends.
    """

    def __init__(
        self,
        run: RunDir,
        *,
        attempt: int,
        plan: Plan,
        started: float,
        board: StatusWriter,
        replicas: ReplicaRunner,
        notices: SignalHandler,
        components: Sequence[Component],
        state: AttemptState,
        on_bug: Callable[[asyncio.Task[None]], None],
    ) -> None:
        self._run, self._attempt, self._plan, self._started = run, attempt, plan, started
        self._board, self._replicas, self._notices, self._components = board, replicas, notices, components
        self._state = state
        self._parent = os.getppid()
        self._on_bug = on_bug
        self._looking: asyncio.Task[None] | None = None
        self._blind = ""

    async def run(self) -> None:
        """Check periodically; never returns."""
        try:
            await self._watch()
        finally:
            if self._looking is not None:
                self._looking.cancel()

    async def _watch(self) -> None:
        looked = time.monotonic()
        while True:
            await asyncio.sleep(_TICK_S)
            self._board.tick()
            if self._state.is_decided():
                continue
            if time.monotonic() - self._started > self._plan.time_limit_s:
                hours = self._plan.time_limit_s / 3600
                self._fail(CauseKind.TIME_LIMIT, f"the run took longer than its limit of {hours:.3g} h")
            if os.getppid() != self._parent:
                self._fail(CauseKind.LAUNCHER_LOST, f"the submitit controller (pid {self._parent}) ended")
            if self._looking is None or self._looking.done():
                # in a task of its own: a filesystem that does not answer must not delay the check of the time limit
                around = time.monotonic() - looked > _LOOK_S
                looked = time.monotonic() if around else looked
                self._looking = asyncio.create_task(self._look(around=around), name="look")
                self._looking.add_done_callback(self._on_bug)

    def _fail(self, kind: CauseKind, message: str) -> None:
        self._state.fail(Cause(kind=kind, time_s=time.time(), message=message))

    async def _look(self, *, around: bool) -> None:
        try:
            await self._end_slow_failures()
            await self._end_complained()
            if around:
                await self._notices.look_at_clock(time.monotonic() - self._started)
                self._blind = ""
        except OSError as error:
            if str(error) != self._blind:
                _log.warning("the state of the run cannot be read now, the next check tries again: %s", error)
            self._blind = str(error)

    async def _end_complained(self) -> None:
        """End replicas that other roles complain about: rollouts of a silent worker are lost until it is back."""
        for complaint in await asyncio.to_thread(Complaint.read_all, self._run, self._attempt):
            for component in self._components:
                about = (component.role.value, component.replica) == (complaint.role, complaint.replica)
                ready = component.state is ComponentState.READY and component.verdict is None
                if about and ready and complaint.time_s > (component.ready_at_s or 0.0):
                    kind = CauseKind.WRONG_WEIGHTS if complaint.wrong_weights else CauseKind.STALE
                    self._replicas.end_stale(component, complaint.message, kind)

    async def _end_slow_failures(self) -> None:
        """End roles that reported a failure but still run: a launcher of ranks may wait for ranks that hang."""
        records: list[FailureRecord] = await asyncio.to_thread(
            current_records, self._run, self._attempt, list(self._components)
        )
        now_s = time.time()
        said = {(r.role, r.replica) for r in records if now_s - r.time_s > _LAST_WORD_S}
        slow = [c for c in self._components if (c.role.value, c.replica) in said]
        for component in slow:
            if component.group.policy.restart != "never" and component.end is None and component.process is not None:
                component.process.kill()
        if any(component.group.policy.restart == "never" for component in slow):
            self._state.fail(*slow_failures(records, self._components))
