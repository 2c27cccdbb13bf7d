"""The end of an attempt: roles are drained in the remaining time, and the last reports are written."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from hpcrl.config.plan import Plan
from hpcrl.runs.cause import Cause
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunState
from hpcrl.supervisor.attempt.attempt_state import AttemptState
from hpcrl.supervisor.attempt.drain import Drain
from hpcrl.supervisor.attempt.save_first import save_first
from hpcrl.supervisor.recovery.attempts import longest_save_s, retries
from hpcrl.supervisor.replicas.component import Component
from hpcrl.supervisor.status.status_writer import StatusWriter

_log = logging.getLogger(__name__)
_SAVE_PATIENCE_S = 60.0
"""Timeout in seconds of the wait for a checkpoint that is being written, before a save was measured."""
_SAVE_PATIENCE_KILLED_S = 15.0
"""The same if Slurm ends the job: its ``KillWait`` is 30 s by default."""
_LAST_WORDS_S = 60.0
"""Timeout in seconds for the reports about the end of an attempt."""
_LAST_WORDS_HURRIED_S = 5.0
"""The same if Slurm ends the job, or a requeue follows."""
_REQUEUE_S = 7.0
"""Seconds that are reserved before Slurm's kill for the requeue, in addition to those for the last reports."""
_MEASURED_S = 3.0
"""Timeout in seconds for reading how long saves took."""
_SLACK_S = 2.0
_LEAST_DRAIN_S = 3.0
"""Minimum seconds for draining; with less the roles are left to Slurm, which ends them with the requeue."""


class Ending:
    """The end of one attempt; see the module."""

    def __init__(self, run: RunDir, *, plan: Plan, state: AttemptState, drain: Drain, board: StatusWriter) -> None:
        self._run, self._plan, self._state, self._drain, self._board = run, plan, state, drain, board

    async def save_first(self, cause: Cause, component: Component, components: Sequence[Component]) -> None:
        """See `hpcrl.supervisor.attempt.save_first.save_first`."""
        state, board = self._state, self._board
        await save_first(
            self._run, self._plan, cause, component=component, components=components, state=state, board=board
        )

    async def end_roles(self) -> None:
        """Drain the roles in the remaining time; if it is too short, leave them to Slurm and use it for the requeue."""
        left_s = self._state.left_s
        if left_s is None:
            await self._drain.all(save_s=await self._save_limit_s())
            return
        kept_s = _LAST_WORDS_HURRIED_S + (_REQUEUE_S if self._state.requeue else _SLACK_S)
        if left_s - kept_s < _LEAST_DRAIN_S and self._state.requeue:
            self._board.emit("supervisor.left_to_slurm", seconds=left_s)
            return
        await self._drain.all(save_s=await self._save_limit_s(), left_s=max(left_s - kept_s, 1.0))

    def outlook(self, cause: Cause | None) -> RunState | None:
        """Return the state in which the run will end with this attempt; None where another attempt follows."""
        last, again = self._state.outlook(cause, retries=self._retries)
        return None if again or last is RunState.REQUEUED else last

    def conclude(self, cause: Cause | None) -> bool:
        """Enter the state that the attempt ends in; returns whether the next one begins at once."""
        return self._state.conclude(cause, retries=self._retries)

    async def last_words(self) -> None:
        """Wait until they are written, up to a timeout."""
        hurried = self._state.left_s is not None or self._state.state is RunState.REQUEUED
        await asyncio.to_thread(self._board.close, _LAST_WORDS_HURRIED_S if hurried else _LAST_WORDS_S)

    def _retries(self, cause: Cause | None) -> bool:
        try:
            return retries(self._run, self._plan, cause, began_at=self._state.began_at)
        except OSError as error:
            _log.warning("no other attempt is made, because its conditions cannot be read: %s", error)
            return False

    async def _save_limit_s(self) -> float:
        """Return the maximum time in seconds that the end of the attempt waits for a checkpoint being written."""
        if self._state.asked_by_slurm:
            return _SAVE_PATIENCE_KILLED_S
        try:
            async with asyncio.timeout(_MEASURED_S):
                save_s = await asyncio.to_thread(longest_save_s, self._run)
        except (TimeoutError, OSError):
            save_s = None
        return _SAVE_PATIENCE_S if save_s is None else max(_SAVE_PATIENCE_S, 2 * save_s)
