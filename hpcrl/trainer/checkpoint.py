"""Joint checkpoints: the trainer's sharded state and the orchestrator's bytes, saved as one ledger entry."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from hpcrl.checkpoints.ledger import CheckpointEntry, CheckpointLedger
from hpcrl.errors import CheckpointError
from hpcrl.trainer.parallel import Parallel

__all__ = ["load_checkpoint", "save_checkpoint"]

_TRAINER_DIR = "trainer"
_MOMENTS = ("exp_avg", "exp_avg_sq")


def save_checkpoint(
    ledger: CheckpointLedger,
    model: nn.Module,
    optimizer: torch.optim.AdamW,
    parallel: Parallel,
    *,
    step: int,
    attempt: int,
    keep_last: int,
    orchestrator_state: Callable[[], bytes],
) -> None:
    """Save the state after optimizer step ``step``. All ranks call it; all write in parallel.

    Parameters
    ----------
    step:
        Optimizer steps done.
    attempt:
        Of the run.
    keep_last:
        Entries to keep.
    orchestrator_state:
        Asks the orchestrator for its state after ``step``; called on rank 0.

    Raises
    ------
    CheckpointError, OSError, PeerLostError
        On every rank, when any rank failed. What was staged is removed, earlier entries are untouched.
    """
    started_at_s = time.time()
    stage = ledger.stage(step, token=f"attempt-{attempt:04d}")
    parallel.on_leader(stage.create, f"preparing checkpoint {step}")
    try:
        _write(stage.path / _TRAINER_DIR, _state(model, optimizer, step), parallel)

        def commit() -> None:
            ledger.commit(
                stage,
                step=step,
                attempt=attempt,
                world_size=parallel.world_size,
                orchestrator_state=orchestrator_state(),
                started_at_s=started_at_s,
            )
            ledger.retain(keep_last=keep_last)

        parallel.on_leader(commit, f"completing checkpoint {step}")
    except BaseException:
        if parallel.rank == 0:
            stage.discard()
        raise


def load_checkpoint(entry: CheckpointEntry, model: nn.Module, optimizer: torch.optim.AdamW, parallel: Parallel) -> None:
    """Restore ``model``, ``optimizer`` and the random state in place, on any number of ranks.

    Raises
    ------
    CheckpointError
        The entry does not fit the model.
    """
    state = _state(model, optimizer, entry.step)
    try:
        load(state, storage_reader=FileSystemReader(entry.trainer_dir), process_group=parallel.fsdp_group)
    except (CheckpointException, RuntimeError, ValueError) as error:
        raise CheckpointError(f"checkpoint {entry.path} does not fit the model: {error}") from error
    if int(state["step"]) != entry.step:
        raise CheckpointError(
            f"checkpoint {entry.path} holds step {int(state['step'])}, its manifest says {entry.step}"
        )
    torch.set_rng_state(state["rng"])


def _write(path: Path, state: dict[str, Any], parallel: Parallel) -> None:
    # the ledger makes all files durable at once, with their hashes
    writer = FileSystemWriter(path, sync_files=False)
    try:
        save(state, storage_writer=writer, process_group=parallel.fsdp_group)
    except CheckpointException as error:
        raise CheckpointError(f"the trainer's state could not be written to {path}: {error}") from error


def _state(model: nn.Module, optimizer: torch.optim.AdamW, step: int) -> dict[str, Any]:
    """Everything to save, by name; the tensors are those in use, so that a load fills them in place.

    Moments that do not exist yet, before the first optimizer step, are made.
    """
    parameters = dict(model.named_parameters())
    moments: dict[str, Any] = {}
    for name, parameter in parameters.items():
        state = optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for moment in _MOMENTS:
                state[moment] = torch.zeros_like(parameter)
        moments[name] = {key: state[key] for key in ("step", *_MOMENTS)}
    # ranks draw the same random numbers, so one state serves any number of them
    return {
        "model": {name: parameter.detach() for name, parameter in parameters.items()},
        "optimizer": moments,
        "step": torch.tensor(step),
        "rng": torch.get_rng_state(),
    }
