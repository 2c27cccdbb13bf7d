"""Restore an attempt of the orchestrator: the checkpoint that the trainer restores, and the rollouts finished since."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from hpcrl.checkpoints.ledger import CheckpointLedger
from hpcrl.checkpoints.restore import RestoreDecision
from hpcrl.config.recipe import Recipe
from hpcrl.errors import DeadlineError, PeerLostError
from hpcrl.rollouts.batches.warehouse import make_warehouse
from hpcrl.rollouts.core.consumed_files import RolloutFiles
from hpcrl.rollouts.environments import Environment
from hpcrl.rollouts.environments.data_order import DataOrder, GroupTask
from hpcrl.rollouts.ledger.ledger import RestoredRollouts, RolloutLedger
from hpcrl.rollouts.ledger.state import OrchestratorState
from hpcrl.runs.role import RoleContext, restore_path

_log = logging.getLogger(__name__)

_POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class RestoredAttempt:
    """State with which an attempt begins."""

    state: OrchestratorState
    """State of the checkpoint, with rollouts that finished after it."""
    order: DataOrder
    files: RolloutFiles
    ledger: RolloutLedger
    restart: list[GroupTask]
    """Groups that must be started again."""
    found: RestoredRollouts
    """Rollouts of these groups in the ledger."""


async def restore_attempt(
    context: RoleContext,
    recipe: Recipe,
    environments: Sequence[Environment],
    *,
    closing: contextlib.AsyncExitStack,
) -> RestoredAttempt:
    """Restore the checkpoint that the trainer restores, and continue with later entries of the ledger.

    Parameters
    ----------
    closing:
        Gets the end of the ledger.

    Raises
    ------
    HpcrlError
        See `restored_state` and `open_ledger`.
    OSError
        The filesystem refused.
    """
    state = await restored_state(context, recipe)
    order = DataOrder(recipe, environments)
    # the fence first: a delayed orchestrator of an older attempt must not write into the ledger
    files = await asyncio.to_thread(RolloutFiles.claim, context.run.rollouts_dir, context.attempt)
    ledger = await asyncio.to_thread(open_ledger, context, recipe, state.step)
    closing.push_async_callback(asyncio.to_thread, ledger.close)
    state, restart, found = await resume_from_ledger(ledger, state, order)
    return RestoredAttempt(state=state, order=order, files=files, ledger=ledger, restart=restart, found=found)


async def restored_state(context: RoleContext, recipe: Recipe) -> OrchestratorState:
    """Return the state at the step that the trainer restores, or that of a fresh run.

    Raises
    ------
    PeerLostError
        The trainer found no checkpoint that it could restore.
    DeadlineError
        The trainer did not decide in time which checkpoint it restores.
    CheckpointError
        The checkpoint belongs to another recipe.
    """
    decision = await _decision(context, recipe)
    if decision.step is None:
        return OrchestratorState.fresh(recipe)
    entry = await asyncio.to_thread(CheckpointLedger(context.run.checkpoints_dir).open, decision.step)
    state = OrchestratorState.decode(await asyncio.to_thread(entry.orchestrator_state))
    state.check(step=entry.step, seed=recipe.seed, group_size=recipe.rollouts.group_size)
    _log.info("restored step %d with %d finished groups", state.step, len(state.logged) + len(state.saved))
    return state


def open_ledger(context: RoleContext, recipe: Recipe, step: int) -> RolloutLedger:
    """Open the ledger of rollouts, with its warehouse, for an attempt that has restored ``step``.

    Raises
    ------
    HpcrlError
        The recipe configures a pool for rollouts, and it cannot be created or joined.
    OSError
        The filesystem refused.
    """
    return RolloutLedger(
        context.run.rollouts_dir,
        attempt=context.attempt,
        restored=step,
        bound=recipe.rollouts.max_off_policy_steps,
        limit_s=recipe.handoff.retry_s,
        checkpoints=CheckpointLedger(context.run.checkpoints_dir).steps,
        replays=recipe.rollouts.order == "deterministic",
        warehouse=make_warehouse(recipe.rollouts.warehouse, url=context.endpoints().one("orchestrator")),
    )


async def resume_from_ledger(
    ledger: RolloutLedger, state: OrchestratorState, order: DataOrder
) -> tuple[OrchestratorState, list[GroupTask], RestoredRollouts]:
    """Add rollouts that finished after the checkpoint.

    Returns
    -------
    tuple
        The state with it; groups to start again; what of these there is.
    """
    found = await asyncio.to_thread(ledger.find, state.group_size)
    restart = state.groups_to_redispatch(order, found)
    adopted = []
    for group in state.saved:
        task = order.again(group.index, group.environment, group.prompt_index)
        if group.index not in found.finished and group.index not in found.over and task is not None:
            adopted.append(await ledger.adopt(group, task))
    state = msgspec.structs.replace(state, finished=adopted, saved=[])
    return state.with_ledger(found), restart, found


async def _decision(context: RoleContext, recipe: Recipe) -> RestoreDecision:
    """Return the trainer's decision about the checkpoint to restore.

    The orchestrator does not choose by itself, because two processes could choose differently.
    """
    timeout_s = recipe.checkpoint.verify_timeout_s + recipe.orchestrator.wait_timeout_s
    path = restore_path(context.run, context.attempt)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while (decision := await asyncio.to_thread(RestoreDecision.find, path)) is None:
                await asyncio.sleep(_POLL_S)
            if decision.refused:
                raise PeerLostError("the trainer begins with nothing: no checkpoint can be restored")
            return decision
    raise DeadlineError(
        f"the trainer did not say within {timeout_s:g} s which checkpoint it restores ({path})\n"
        "    hint: the trainer's log shows its progress; checkpoint.verify: sizes reads less"
    )
