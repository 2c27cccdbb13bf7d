"""Chooses what an attempt begins with: the newest intact checkpoint, a person's request, or an end with the reason."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import msgspec

from hpcrl.checkpoints.checks import record_check
from hpcrl.checkpoints.restore import RestoreDecision
from hpcrl.checkpoints.writer import CheckpointWriter
from hpcrl.config.recipe import CheckpointConfig
from hpcrl.errors import NothingToRestoreError
from hpcrl.runs.resume_request import ResumeRequest, ever_saved, nothing_to_restore
from hpcrl.runs.role import RoleContext, restore_path
from hpcrl.runs.rundir import RunDir
from hpcrl.storage.quarantine import list_asides
from hpcrl.trainer.parallel.ranks import Ranks
from hpcrl.trainer.state.restore import choose_checkpoint
from hpcrl.trainer.state.saver import Emit

_log = logging.getLogger(__name__)


def choose_restored_checkpoint(
    context: RoleContext, writer: CheckpointWriter, ranks: Ranks, config: CheckpointConfig, emit: Emit
) -> RestoreDecision:
    """Choose, carry out what a person asked for, and write all of it down. All ranks call it; all get the same.

    A run that has ever saved a joint checkpoint begins at step 0 only where a person asked for that
    (`hpcrl.runs.resume_request`), for every start of an attempt: a resume, a requeue or a retry.

    Raises
    ------
    NothingToRestoreError
        There were checkpoints, and none can be restored, or not the one that was asked for. Nothing was changed, and
        the recorded decision is the same.
    DeadlineError, PeerLostError
        The comparison timed out; it is unknown which entry is intact.
    """
    run, attempt = context.run, context.attempt
    request = ranks.on_leader(lambda: ResumeRequest.in_force(run), "reading the restore decision")
    decision = _choose(writer, ranks, config, request)

    def settle() -> RestoreDecision:
        return _settle(run, attempt, writer, decision, request, by=f"attempt {attempt}")

    decision = ranks.on_leader(settle, "recording which checkpoint is restored")
    for skipped in decision.skipped:
        _log.warning("checkpoint of step %d is skipped: %s", skipped.step, skipped.reason)
        emit("trainer.checkpoint_skipped", step=skipped.step, reason=skipped.reason)
    if decision.put_aside:
        emit("trainer.checkpoints_put_aside", steps=decision.put_aside, asked=decision.asked)
    if decision.refused:
        raise NothingToRestoreError(decision.refused)
    return decision


def _choose(
    writer: CheckpointWriter, ranks: Ranks, config: CheckpointConfig, request: ResumeRequest | None
) -> RestoreDecision:
    content = config.verify == "content"
    choose = partial(choose_checkpoint, writer.ledger, ranks, content=content, timeout_s=config.verify_timeout_s)
    if request is None:
        return choose()
    if request.begin == "scratch":
        # a start from scratch reads no checkpoint that could be verified
        return RestoreDecision(step=None, verified=config.verify, seconds=0.0, skipped=[], asked="--from-scratch")
    assert request.step is not None
    step = request.step
    path = ranks.on_leader(lambda: _path_of(writer, step), f"looking for checkpoint {step}")
    return msgspec.structs.replace(choose(only=path), asked=f"--from-step {step}")


def _path_of(writer: CheckpointWriter, step: int) -> Path:
    """Return the path of a step's entry, in the ledger or in quarantine."""
    if step not in writer.ledger.steps():
        for aside in list_asides(writer.root, "step-"):
            if aside.number == step:
                return aside.path
    return writer.ledger.path_of(step)


def _settle(
    run: RunDir,
    attempt: int,
    writer: CheckpointWriter,
    decision: RestoreDecision,
    request: ResumeRequest | None,
    *,
    by: str,
) -> RestoreDecision:
    """Refuse or carry out, then write the decision down."""
    skipped = [(skipped.step, skipped.reason) for skipped in decision.skipped]
    scratch = request is not None and request.begin == "scratch"
    if decision.step is None and not scratch and (saved := ever_saved(run)):
        wanted = None if request is None else request.step
        refused = str(nothing_to_restore(run, saved, skipped, wanted=wanted))
        decision = msgspec.structs.replace(decision, refused=refused)
    elif request is not None:
        # checkpoints begin at step 1: 0 means a start from scratch
        step = 0 if decision.step is None else decision.step
        if decision.step is not None and step not in writer.ledger.steps():
            writer.take_back(next(aside for aside in list_asides(writer.root, "step-") if aside.number == step))
        decision = msgspec.structs.replace(decision, put_aside=writer.put_aside_after(step))
    if decision.step is not None:
        decision = msgspec.structs.replace(decision, saved_by=writer.ledger.open(decision.step).manifest.attempt)
    _record_checks(writer, decision, by)
    decision.write(restore_path(run, attempt))
    return decision


def _record_checks(writer: CheckpointWriter, decision: RestoreDecision, by: str) -> None:
    """Record the checks for ``hpcrl checkpoint ls``; nothing else depends on them, so failures are only logged."""
    content = decision.verified == "content"
    try:
        for skipped in decision.skipped:
            record_check(writer.ledger, skipped.step, content=content, by=by, problem=skipped.reason)
        if decision.step is not None:
            record_check(writer.ledger, decision.step, content=content, by=by)
    except OSError as error:
        _log.warning("the verification is not recorded: %s", error)
