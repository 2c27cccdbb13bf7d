"""Where an attempt of the orchestrator begins: at the checkpoint that the trainer restores, with what is done since."""

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
from hpcrl.rollouts.environments import Environment
from hpcrl.rollouts.files import RolloutFiles
from hpcrl.rollouts.ledger import RestoredRollouts, RolloutLedger
from hpcrl.rollouts.sampling.data_order import DataOrder, GroupTask
from hpcrl.rollouts.state import OrchestratorState
from hpcrl.runs.role import RoleContext, restore_path

__all__ = ["RestoredAttempt", "open_ledger", "restore_attempt", "restored_state", "take_up"]

_log = logging.getLogger(__name__)

_POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class RestoredAttempt:
    """What an attempt begins with."""

    state: OrchestratorState
    """The checkpoint's, with what finished after it."""
    order: DataOrder
    files: RolloutFiles
    ledger: RolloutLedger
    restart: list[GroupTask]
    """Groups that have to be started again."""
    found: RestoredRollouts
    """What the ledger has of these."""


async def restore_attempt(
    context: RoleContext,
    recipe: Recipe,
    environments: Sequence[Environment],
    *,
    closing: contextlib.AsyncExitStack,
) -> RestoredAttempt:
    """Restore the checkpoint that the trainer restores, and go on with what the ledger has after it.

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
    # first the fence: an orchestrator of an older attempt that is late must not write into the ledger
    files = await asyncio.to_thread(RolloutFiles.claim, context.run.rollouts_dir, context.attempt)
    ledger = await asyncio.to_thread(open_ledger, context, recipe, state.step)
    closing.push_async_callback(asyncio.to_thread, ledger.close)
    state, restart, found = await take_up(ledger, state, order)
    return RestoredAttempt(state=state, order=order, files=files, ledger=ledger, restart=restart, found=found)


async def restored_state(context: RoleContext, recipe: Recipe) -> OrchestratorState:
    """The state at the step that the trainer restores, or that of a fresh run.

    Raises
    ------
    PeerLostError
        The trainer found nothing that it could restore.
    DeadlineError
        It did not say in time which checkpoint it restores.
    CheckpointError
        The checkpoint is of another recipe.
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
    """The ledger of rollouts, for an attempt that has restored ``step``, and memory for them.

    Raises
    ------
    HpcrlError
        There is to be a pool for them, and it cannot be made or joined.
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


async def take_up(
    ledger: RolloutLedger, state: OrchestratorState, order: DataOrder
) -> tuple[OrchestratorState, list[GroupTask], RestoredRollouts]:
    """Go on with what finished after the checkpoint, too.

    Returns
    -------
    tuple
        The state with it; groups to start again; what of these there is.
    """
    found = await asyncio.to_thread(ledger.find, state.group_size)
    restart = state.deal_again(order, found)
    adopted = []
    for group in state.saved:
        task = order.again(group.index, group.environment, group.prompt_index)
        if group.index not in found.finished and group.index not in found.over and task is not None:
            adopted.append(await ledger.adopt(group, task))
    state = msgspec.structs.replace(state, finished=adopted, saved=[])
    return state.going_on(found), restart, found


async def _decision(context: RoleContext, recipe: Recipe) -> RestoreDecision:
    """What the trainer restores: two that choose for themselves could choose differently."""
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
        "    hint: the trainer's log says what it does; checkpoint.verify: sizes reads less"
    )
