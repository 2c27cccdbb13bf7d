"""The trainer's part of a joint checkpoint: what is in it, how all ranks write it and read it.

Keys are the names of the model's parameters and values are whole tensors in the sense of torch's distributed
checkpoint: the format does not contain how they were sharded, so any number of ranks and any mesh can read it.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from hpcrl.checkpoints.ledger import CheckpointEntry
from hpcrl.errors import CheckpointError, PeerLostError
from hpcrl.modeling.adapters import adapted_matrices
from hpcrl.modeling.hf import adapter_parameters, model_tensors
from hpcrl.storage import lost_replies
from hpcrl.storage.files import FileRecord
from hpcrl.storage.trusted_paths import NotOursError, check_private, check_tree
from hpcrl.trainer.parallel.mesh import Parallel, is_lost_rank
from hpcrl.trainer.step.muon import MOMENTUM, Muon
from hpcrl.trainer.step.reference import ReferencePolicy

_MOMENTS = ("exp_avg", "exp_avg_sq")
_ACCELERATOR_RNG = "rng_accelerator"
BASE, _SCALE = "base", "lora_scale"
"""Keys of adapters: the digest of the weights that they change, and the factor of their products."""
REFERENCE = "reference"
"""Keys of a refreshed reference: its version, and its weights."""
_BUFFER_BYTES = 4 << 20


def trainer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: int, *, base: Tensor | None = None
) -> dict[str, Any]:
    """Return everything to save, by name; the tensors are those in use, so that a load fills them in place.

    Under ``model`` are parameters and buffers, sharded as they are; under ``optimizer`` by the name of each trained
    parameter two moments in its shape, and how many steps they have seen, a float32 scalar; of a matrix that Muon has,
    its momentum alone. ``step`` is an int64 scalar, ``base`` ``[1]`` int64.

    Of a model with adapters these are all of it that is saved, with ``base``, the digest of the weights that they
    change (`hpcrl.trainer.step.base_digest`).

    Moments that do not exist yet, before the first optimizer step, are made. The learning rate is a function of
    the step; a gradient scaler does not exist.
    """
    if torch.accelerator.is_available():
        # copies to the host that the last step began, as those of moments, may not have ended
        torch.accelerator.synchronize()
    parameters = dict(model.named_parameters())
    moments: dict[str, Any] = {}
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            continue  # frozen: no optimizer has it
        state = optimizer.state[parameter]
        keys = (MOMENTUM,) if isinstance(optimizer, Muon) and optimizer.has(parameter) else ("step", *_MOMENTS)
        if not state:
            for key in keys:
                state[key] = (
                    torch.zeros((), dtype=torch.float32, device=parameter.device)
                    if key == "step"
                    else torch.zeros_like(parameter)
                )
        moments[name] = {key: state[key] for key in keys}
    saved = model_tensors(model) if base is None else adapter_parameters(model)
    # ranks draw the same random numbers, so one state serves any number of them
    whole: dict[str, Any] = {
        "model": {name: tensor.detach() for name, tensor in saved.items()},
        "optimizer": moments,
        "step": torch.tensor(step),
        "rng": torch.get_rng_state(),
    }
    if base is not None:
        scales = [adapted.scale for adapted in adapted_matrices(model)]
        whole |= {BASE: base.clone(), _SCALE: torch.tensor(scales[:1], dtype=torch.float64)}
    device = next(iter(parameters.values())).device
    if device.type != "cpu":
        whole[_ACCELERATOR_RNG] = torch.get_device_module(device).get_rng_state(device)
    return whole


def state_bytes(state: dict[str, Any]) -> int:
    """Return the bytes of all tensors of a `trainer_state`, over all ranks."""
    return sum(
        state_bytes(value) if isinstance(value, dict) else value.numel() * value.element_size()
        for value in state.values()
    )


def copy_to_host(state: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of ``state`` in host memory that later optimizer steps do not change. Local to each rank."""
    # a directory is asked for and not used: staging is a method of the writer
    return FileSystemWriter(os.devnull).stage(state)


def write_state(directory: Path, state: dict[str, Any], group: dist.ProcessGroup) -> dict[str, FileRecord]:
    """Write ``state`` below the existing ``directory``, all ranks in parallel; all of it is durable on return.

    Parameters
    ----------
    state:
        Result of `trainer_state` or `copy_to_host`.
    group:
        Process group of all ranks that carries host tensors. Only this call may use it meanwhile.

    Returns
    -------
    dict
        Records of the files that this rank wrote, by name, hashed while they were written.

    Raises
    ------
    CheckpointError
        On every rank, when any rank failed to write.
    """
    writer = FileSystemWriter(directory, sync_files=True)
    files = _HashedFiles()
    writer.fs = files
    try:
        save(state, storage_writer=writer, process_group=group)
    except CheckpointException as error:
        reasons = "; ".join(
            f"rank {rank}: {type(reason).__name__}: {reason}" for rank, (reason, _) in error.failures.items()
        )
        raise CheckpointError(f"the trainer's state could not be written to {directory}: {reasons}") from error
    return files.records


def load_checkpoint(
    entry: CheckpointEntry,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    parallel: Parallel,
    *,
    base: Tensor | None = None,
    reference: ReferencePolicy | None = None,
) -> None:
    """Restore ``model``, ``optimizer`` and the random state in place, on any number of ranks.

    Parameters
    ----------
    base:
        ``[1]`` int64, as in `trainer_state`: of the weights that adapters change now.
    reference:
        Reference to restore, too; without weights of it in the entry it stays the start model that was loaded.

    Raises
    ------
    CheckpointError
        The entry does not fit the model, or adapters in it were trained on other weights.
    PeerLostError
        Another rank went away: nothing is known of the entry.
    """
    check_owner(entry)
    state = trainer_state(model, optimizer, entry.step, base=base)
    reader = FileSystemReader(entry.trainer_dir)
    try:
        _check_base(entry, state, reader)
        _check_moments(entry, state, reader)
        held = reader.read_metadata().state_dict_metadata
        if reference is not None and (of_reference := reference.state_to_fill(held, REFERENCE)) is not None:
            state[REFERENCE] = of_reference
        if _ACCELERATOR_RNG in state and _ACCELERATOR_RNG not in held:
            del state[_ACCELERATOR_RNG]  # saved without an accelerator: its random numbers begin at the seed
        load(state, storage_reader=reader, process_group=parallel.world.group)
    except (CheckpointException, RuntimeError, ValueError) as error:
        if isinstance(error, RuntimeError) and is_lost_rank(error):
            what = f"another rank of the trainer was lost while {entry.path} was read"
            raise PeerLostError(f"{what}: {error}") from error
        raise CheckpointError(f"checkpoint {entry.path} does not fit the model: {error}") from error
    if int(state["step"]) != entry.step:
        raise CheckpointError(
            f"checkpoint {entry.path} holds step {int(state['step'])}, its manifest says {entry.step}"
        )
    if reference is not None and REFERENCE in state:
        reference.restored(state[REFERENCE])
    torch.set_rng_state(state["rng"])
    if _ACCELERATOR_RNG in state:
        torch.get_device_module(parallel.device).set_rng_state(state[_ACCELERATOR_RNG], parallel.device)


def load_alone(state: dict[str, Any], directory: Path) -> None:
    """Fill the tensors of ``state`` in place from a trainer's state, in one process that asks no other."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(state, storage_reader=FileSystemReader(directory), no_dist=True)


def _check_base(entry: CheckpointEntry, state: dict[str, Any], reader: FileSystemReader) -> None:
    """Check that the checkpoint matches what is trained now: weights, or adapters of the same weights.

    Raises
    ------
    CheckpointError
        It does not match.
    """
    then, now = BASE in reader.read_metadata().state_dict_metadata, BASE in state
    if then != now:
        held, wanted = ("adapters", "weights") if then else ("weights", "adapters")
        raise CheckpointError(
            f"checkpoint {entry.path} holds {held}, and {wanted} are trained\n    hint: leave trainer.lora as it was"
        )
    if not now:
        return
    found = {key: torch.empty_like(state[key]) for key in (BASE, _SCALE)}
    load_alone(found, entry.trainer_dir)
    if not torch.equal(found[BASE], state[BASE]):
        raise CheckpointError(
            f"the adapters of checkpoint {entry.path} were trained on other weights than those of the start model\n"
            "    hint: give model.path the directory that the run began with, unchanged"
        )
    if not torch.equal(found[_SCALE], state[_SCALE]):
        raise CheckpointError(
            f"the adapters of checkpoint {entry.path} had the scale {found[_SCALE].item():g}, and now "
            f"have {state[_SCALE].item():g}\n    hint: leave trainer.lora.alpha and rank as they were"
        )


def _check_moments(entry: CheckpointEntry, state: dict[str, Any], reader: FileSystemReader) -> None:
    """Check that the checkpoint has optimizer states for everything that is trained now (CheckpointError otherwise)."""
    held = reader.read_metadata().state_dict_metadata
    lacking = [
        name
        for name, moments in state["optimizer"].items()
        if f"model.{name}" in held and any(f"optimizer.{name}.{key}" not in held for key in moments)
    ]
    others = [name for name in lacking if any(f"optimizer.{name}.{key}" in held for key in (MOMENTUM, *_MOMENTS))]
    if others:
        kinds = ("adamw", "muon") if MOMENTUM in state["optimizer"][others[0]] else ("muon", "adamw")
        raise CheckpointError(
            f"checkpoint {entry.path} has optimizer state of another kind for {len(others)} parameters, the first is "
            f"{others[0]}: it was saved with {kinds[0]}, and the recipe says {kinds[1]}\n"
            f"    hint: set trainer.optimizer.kind: {kinds[0]}, or start a new run from the exported weights"
        )
    if lacking:
        raise CheckpointError(
            f"checkpoint {entry.path} has no optimizer state of {len(lacking)} parameters, the first is {lacking[0]}: "
            "they were frozen when it was saved\n    hint: leave trainer.freeze as it was"
        )


def check_owner(entry: CheckpointEntry) -> None:
    """Check that no other user could have written the trainer's state: torch unpickles parts of it.

    Raises
    ------
    CheckpointError
        Others own some of it, or may write to it.
    """
    try:
        for directory in (entry.path.parent, entry.path):
            check_private(directory)
        check_tree(entry.trainer_dir)
    except NotOursError as error:
        raise CheckpointError(
            f"{error}: files of the checkpoint would be executed as you\n"
            f"    hint: if it is yours: chmod -R go-w {entry.path.parent}"
        ) from error


class _HashedFiles(FileSystem):
    """torch's file operations, which also hash what is written, and make no directory but the last."""

    def __init__(self) -> None:
        self.records: dict[str, FileRecord] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with Path(path).open("wb", buffering=_BUFFER_BYTES) as file:
            stream = _HashingStream(file)
            yield stream
            stream.finish()
        self.records[Path(path).name] = stream.record()

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        # with parents a process that was fenced off would make its directory again
        Path(path).mkdir(exist_ok=True)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        lost_replies.rename(path, new_path)
        self.records[Path(new_path).name] = self.records.pop(Path(path).name)


class _HashingStream(io.RawIOBase):
    """Passes writes on and hashes them. It cannot seek: what is hashed is what is in the file."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._digest, self._bytes = file, xxhash.xxh3_128(), 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._file.write(data)
        self._digest.update(data)
        size = memoryview(data).nbytes
        self._bytes += size
        return size

    def tell(self) -> int:
        return self._bytes

    def flush(self) -> None:
        # torch flushes after each tensor; flushing in `fileno` and `finish` is enough
        return

    def fileno(self) -> int:
        self._file.flush()  # a caller that asks for the descriptor is about to fsync
        return self._file.fileno()

    def finish(self) -> None:
        """Write what is buffered (the caller closes the file)."""
        self._file.flush()

    def record(self) -> FileRecord:
        """Return length and hash of all that was written."""
        return FileRecord(self._bytes, self._digest.hexdigest())
