"""How an attempt ends: roles are drained in the time that there is, and the last words are said."""

from __future__ import annotations

import asyncio
import logging

from hpcrl.config.plan import Plan
from hpcrl.runs.cause import Cause
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunState
from hpcrl.supervisor.attempt_state import AttemptState
from hpcrl.supervisor.board import Board
from hpcrl.supervisor.drain import Drain
from hpcrl.supervisor.policy.attempts import longest_save_s, retries

__all__ = ["Ending"]

_log = logging.getLogger(__name__)
_SAVE_PATIENCE_S = 60.0
"""How long the end of an attempt waits for a checkpoint that is being written, before one was measured."""
_SAVE_PATIENCE_KILLED_S = 15.0
"""The same where Slurm ends us: its ``KillWait`` is 30 s by default."""
_LAST_WORDS_S = 60.0
"""How long the end of an attempt tries to say what became of it."""
_LAST_WORDS_HURRIED_S = 5.0
"""The same where Slurm ends us, or is to be asked for the requeue."""
_REQUEUE_S = 7.0
"""Of the time until Slurm ends us this is kept for the request to be requeued, beside that for the last words."""
_MEASURED_S = 3.0
"""How long it may take to read how long saves took."""
_SLACK_S = 2.0
_LEAST_DRAIN_S = 3.0
"""With less the roles are left to Slurm, which ends them with the requeue."""


class Ending:
    """The end of one attempt; see the module."""

    def __init__(self, run: RunDir, *, plan: Plan, state: AttemptState, drain: Drain, board: Board) -> None:
        self._run, self._plan, self._state, self._drain, self._board = run, plan, state, drain, board

    async def end_roles(self) -> None:
        """Drain, in the time that there is; where that is too short, the requeue is worth more than an end in order."""
        left_s = self._state.left_s
        if left_s is None:
            await self._drain.all(save_s=await self._save_limit_s())
            return
        kept_s = _LAST_WORDS_HURRIED_S + (_REQUEUE_S if self._state.requeue else _SLACK_S)
        if left_s - kept_s < _LEAST_DRAIN_S and self._state.requeue:
            self._board.emit("supervisor.left_to_slurm", seconds=left_s)
            return
        await self._drain.all(save_s=await self._save_limit_s(), left_s=max(left_s - kept_s, 1.0))

    def conclude(self, cause: Cause | None) -> bool:
        """Enter the state that the attempt ends in; returns whether the next one begins at once."""
        return self._state.conclude(cause, retries=self._retries)

    async def last_words(self) -> None:
        """Wait until they are written, and not for ever."""
        hurried = self._state.left_s is not None or self._state.state is RunState.REQUEUED
        await asyncio.to_thread(self._board.close, _LAST_WORDS_HURRIED_S if hurried else _LAST_WORDS_S)

    def _retries(self, cause: Cause | None) -> bool:
        try:
            return retries(self._run, self._plan, cause, began_at=self._state.began_at)
        except OSError as error:
            _log.warning("no other attempt is made: whether it may be cannot be read: %s", error)
            return False

    async def _save_limit_s(self) -> float:
        """How long the end waits for a checkpoint that is being written."""
        if self._state.asked_by_slurm:
            return _SAVE_PATIENCE_KILLED_S
        try:
            async with asyncio.timeout(_MEASURED_S):
                save_s = await asyncio.to_thread(longest_save_s, self._run)
        except (TimeoutError, OSError):
            save_s = None
        return _SAVE_PATIENCE_S if save_s is None else max(_SAVE_PATIENCE_S, 2 * save_s)
