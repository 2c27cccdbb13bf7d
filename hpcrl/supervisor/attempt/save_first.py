"""A checkpoint before the end of an attempt that lost the node of an engine, while the trainer still works."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from hpcrl.config.plan import Plan
from hpcrl.runs.cause import Cause, CauseKind
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ComponentState
from hpcrl.supervisor.attempt.attempt_state import AttemptState
from hpcrl.supervisor.recovery.attempts import LEAVE_S, lead_s, save_now
from hpcrl.supervisor.replicas.component import Component
from hpcrl.supervisor.status.status_writer import StatusWriter

_log = logging.getLogger(__name__)


async def save_first(
    run: RunDir,
    plan: Plan,
    cause: Cause,
    *,
    component: Component,
    components: Sequence[Component],
    state: AttemptState,
    board: StatusWriter,
) -> None:
    """Let the trainer save if a job with spare nodes has lost the node of an engine and others still sample.

    In other jobs Slurm ends the trainer with that node. The wait is over when the end of the attempt is decided, or
    after the time of a step and of two saves.

    Parameters
    ----------
    cause:
        Why the replica was lost.
    component:
        The replica, which is not started again.
    components, state:
        All replicas, and the state of the attempt.
    """
    others = [each for each in components if each.group is component.group and each is not component]
    trainers = [each for each in components if each.group.policy.ends_run and each is not component]
    works = trainers and all(each.state is ComponentState.READY for each in trainers)
    samples = any(each.state is ComponentState.READY for each in others)
    on_node = cause.kind is CauseKind.NODE_FAIL and board.nodes is not None
    if not (on_node and works and samples and plan.attempts.saves) or state.saving or state.is_decided():
        return
    began = time.monotonic()
    try:
        lead = await asyncio.to_thread(lead_s, run, plan)
    except OSError as error:
        _log.warning("the duration of a save cannot be read now: %s", error)
        lead = plan.attempts.signal_lead_s
    saving = asyncio.create_task(save_now(run, board.attempt, timeout_s=max(lead - LEAVE_S, 0.0)))
    ended = asyncio.create_task(state.wait_decided())
    await asyncio.wait({saving, ended}, return_when=asyncio.FIRST_COMPLETED)
    step = saving.result() if saving.done() and not saving.cancelled() else None
    for task in (saving, ended):
        task.cancel()
    await asyncio.wait({saving, ended})
    board.emit("supervisor.saved", step=step, seconds=time.monotonic() - began)
