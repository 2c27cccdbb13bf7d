"""The end of an attempt: all roles are asked to stop in order, and nothing is left."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from hpcrl.config.plan import Plan, Role
from hpcrl.runs.progress import RoleProgress, progress_path
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ComponentState
from hpcrl.supervisor.launch.replica_launcher import Launcher
from hpcrl.supervisor.recovery.graph import drain_stages
from hpcrl.supervisor.replicas.component import Component
from hpcrl.supervisor.status.status_writer import StatusWriter

_LEAST_GRACE_S = 1.0
"""Minimum seconds between SIGTERM and SIGKILL of a role, even if earlier roles used up the time."""
_ANSWER_S = 5.0
"""Seconds for guards in addition to the grace if time is short; else more (`hpcrl.supervisor.process.guarded`)."""
_LATER_S = 2.0
"""Seconds reserved for each later stage if time is short."""
_LOOK_S = 0.2
_SAVING = "checkpoint"
"""The trainer's phase in which a SIGTERM would cost a checkpoint."""


class Drain:
    """Stops replicas.

    Parameters
    ----------
    drives:
        The task of each replica that was started or waits for its start.
    hurry:
        Set when the drain must not wait any longer.
    spared:
        Returns pids of processes that are neither roles nor orphans.
    """

    def __init__(
        self,
        run: RunDir,
        *,
        run_id: str,
        plan: Plan,
        launcher: Launcher,
        board: StatusWriter,
        components: Sequence[Component],
        drives: Mapping[Component, asyncio.Task[None]],
        hurry: asyncio.Event,
        spared: Callable[[], Collection[int]] = frozenset,
    ) -> None:
        self._run, self._run_id, self._plan, self._launcher, self._board = run, run_id, plan, launcher, board
        self._components, self._drives, self._hurry, self._spared = components, drives, hurry, spared

    async def all(self, *, save_s: float, left_s: float | None = None) -> None:
        """Stop all roles in order; nothing is left when this returns, but for what was cut off.

        Parameters
        ----------
        save_s:
            Maximum wait in seconds for a checkpoint that the trainer is writing; other roles only get a short grace.
        left_s:
            Time for all of this; None where there is enough. A guard that cannot be reached is cut off in time: what
            it leaves on its node is for Slurm to end.
        """
        ends_at = math.inf if left_s is None else time.monotonic() + left_s
        hurried = asyncio.create_task(self._kill_on_hurry())
        if any(c.end is not None and c.end.guard_lost for c in self._components):
            await self.orphans()
        longest_s = max((g.policy.stop_timeout_s for g in self._plan.groups), default=0.0)
        stages = drain_stages(self._plan)
        await self._wait_for_save(min(save_s, ends_at - time.monotonic() - len(stages) * _LATER_S))
        deadline = time.monotonic() + longest_s
        for later, stage in zip(reversed(range(len(stages))), stages, strict=True):
            members = [c for c in self._components if c.group in stage]
            limit_s = max(ends_at - time.monotonic() - later * _LATER_S, _LEAST_GRACE_S)
            grace_s = min(max(deadline - time.monotonic(), _LEAST_GRACE_S), max(g.policy.stop_timeout_s for g in stage))
            cut_s = min(limit_s, grace_s + _ANSWER_S) if ends_at < math.inf else math.inf
            await asyncio.gather(*(self._stop_in_time(c, min(grace_s, limit_s), cut_s) for c in members))
        hurried.cancel()
        await self.orphans()

    async def _wait_for_save(self, limit_s: float) -> None:
        """Wait for a checkpoint that is being written, up to ``limit_s`` seconds, as long as it can still complete."""
        trainers = [c for c in self._components if c.role is Role.TRAINER and c.state is ComponentState.READY]
        partners = [c for c in self._components if c.role is Role.ORCHESTRATOR]
        began = time.monotonic()
        while trainers and not self._hurry.is_set() and time.monotonic() - began < limit_s:
            # a joint checkpoint needs the orchestrator's part, and a hanging replica saves nothing: waiting is useless
            lost = any(c.state is not ComponentState.READY or c.verdict for c in partners)
            trainers = [c for c in trainers if c.state is ComponentState.READY and c.verdict is None]
            if lost or not any(self._saves(c) for c in trainers):
                break
            await asyncio.sleep(_LOOK_S)
        waited = time.monotonic() - began
        if waited > _LOOK_S:
            self._board.emit("supervisor.waited_for_save", seconds=waited)

    def _saves(self, component: Component) -> bool:
        path = progress_path(self._run, self._board.attempt, component.role.value, component.replica)
        progress = RoleProgress.read(path)
        return progress is not None and progress.time_s >= component.lives_since_s and progress.phase == _SAVING

    async def _stop_in_time(self, component: Component, grace_s: float, cut_s: float) -> None:
        """Run `_stop` for at most ``cut_s`` seconds."""
        stopping = asyncio.create_task(self._stop(component, grace_s))
        done, _ = await asyncio.wait({stopping}, timeout=None if cut_s == math.inf else cut_s)
        if not done and component.process is not None:
            self._board.emit("supervisor.cut_off", role=component.role, replica=component.replica, seconds=cut_s)
            component.process.cut_off()
        await stopping

    async def _stop(self, component: Component, grace_s: float) -> None:
        drive = self._drives.get(component)
        if drive is not None and (component.process is None or component.state is ComponentState.RESTARTING):
            drive.cancel()  # a guard that is still being started sees its pipe close and ends
        component.ask_to_stop(min(grace_s, component.group.policy.stop_timeout_s))
        if component.process is not None:
            left = await component.process.gone()
            if left:
                self._board.emit("supervisor.left_behind", pids=left)
            if drive is not None:
                await asyncio.wait({drive})

    async def _kill_on_hurry(self) -> None:
        await self._hurry.wait()
        for component in self._components:
            if component.process is not None:
                component.process.kill()

    async def orphans(self) -> None:
        """End what lost its guard."""
        lost = {c for c in self._components if c.end is not None and c.end.guard_lost}
        guards = {c.process.guard_pid for c in self._components if c.process is not None and c not in lost}
        guards.update(self._spared())
        orphans = await asyncio.to_thread(self._launcher.end_orphans, self._run_id, guards)
        if orphans:
            self._board.emit("supervisor.orphans", pids=orphans)
