"""Writing the weights of a checkpoint as a Hugging Face model directory; behind ``hpcrl checkpoint export``.

A shard of the output at a time is read, converted and written, so memory is bounded by the shard and not by the
model: about ``shard_bytes · (1 + 4 / bytes of the dtype)``, or so much for one parameter where that is larger.
"""

from __future__ import annotations

import argparse
import os
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from hpcrl.checkpoints.ledger import CheckpointEntry, CheckpointLedger
from hpcrl.config.recipe import Recipe
from hpcrl.errors import CheckpointError, HpcrlError, UsageError
from hpcrl.modeling.checkpoint_io.carried import CarriedTensor, carry, find_mtp_tensors
from hpcrl.modeling.decoder import Decoder
from hpcrl.modeling.hf import CARRIED, model_tensors
from hpcrl.modeling.spec import spec_of
from hpcrl.models.adapting import unread_by_peft
from hpcrl.models.arch import ModelArch, load_arch, read_model_config
from hpcrl.models.wrapped import WRAPPER_FILES
from hpcrl.models.written import is_true_of_copies, written_config
from hpcrl.reporting.screen_text import visible
from hpcrl.runs.registry import reference
from hpcrl.runs.rundir import RunDir
from hpcrl.storage.files import StagedDirectory, fsync_dir, write_json
from hpcrl.trainer.state.checkpoint import check_owner, load_alone
from hpcrl.trainer.state.merged import MergedWeights, holds_adapters
from hpcrl.trainer.state.wrapped_export import WrappedExport

DTYPES = ("float32", "bfloat16", "float16")
_SHARD_BYTES = 4 << 30
_PREFIX = "model."
_INDEX = "model.safetensors.index.json"
_COMPANION_BYTES = 64 << 20
_COMPANION_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py")


def export_checkpoint(
    entry: CheckpointEntry,
    model_dir: Path,
    output: Path,
    *,
    dtype: str,
    shard_bytes: int = _SHARD_BYTES,
    recipe: Recipe | None = None,
) -> int:
    """Write the weights of ``entry`` to ``output``; it appears when it is complete. Returns bytes of tensors.

    Parameters
    ----------
    entry:
        Verified by the caller.
    model_dir:
        Start model: its configuration, tokenizer and other small files are copied; with ``model.vision: carry`` of the
        recipe also its parts other than the language model.
    output:
        Directory to make; must not exist.
    dtype:
        One of `DTYPES`, for all tensors.
    shard_bytes:
        Approximate size of one safetensors file in bytes.
    recipe:
        Recipe of the run; needed if the checkpoint has adapters, which are merged into the start model: bit by bit the
        weights of engines that serve its version, where ``dtype`` is that of versions.

    Raises
    ------
    CheckpointError
        The checkpoint does not fit the model.
    OSError
        The filesystem refused; nothing is left.
    """
    check_owner(entry)
    arch = load_arch(model_dir)
    form = WrappedExport(model_dir) if recipe is not None and recipe.model.vision == "carry" else None
    # on ``meta``: only its names and shapes are used, to read the checkpoint
    model = spec_of(arch).build(arch, device="meta")
    merged = holds_adapters(entry)
    if not merged:
        carried = _carried(entry)
    else:
        keeps = recipe is not None and recipe.trainer.mtp_tensors == "keep" and arch.num_nextn_predict_layers
        carried = find_mtp_tensors(model_dir, model.adapter) if keeps else []
    carry(model, carried, lambda own: torch.empty(own.shape, dtype=getattr(torch, own.dtype), device="meta"))
    stage = StagedDirectory(output, token=f"export-{os.getpid()}")
    stage.create()
    try:
        total, weight_map, own_names = 0, dict[str, str](), list[str]()
        weights = _merged(entry, model, model_dir, recipe) if merged else _Weights(entry, model)
        for file, tensors in _portions(weights, model, getattr(torch, dtype), shard_bytes):
            own_names += tensors
            placed = tensors if form is None else form.place(tensors)
            weight_map |= dict.fromkeys(placed, file)
            total += _save(placed, stage.path / file)
        if form is not None:
            file, sizes = form.write_tower(stage.path)
            weight_map |= dict.fromkeys(sizes, file)
            total += sum(sizes.values())
        if isinstance(weights, MergedWeights):
            weights.check_base()
        write_json(stage.path / _INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
        _copy_companions(model_dir, stage.path, wrapper=form is not None)
        if form is None:
            config = written_config(read_model_config(model_dir), own_names, dtype=dtype)
        else:
            config = form.config(own_names, dtype, tied=arch.tie_word_embeddings)
        write_json(stage.path / "config.json", config)
        fsync_dir(stage.path)
        stage.commit()
    except BaseException:
        stage.discard()
        raise
    return total


def _merged(entry: CheckpointEntry, model: Decoder, model_dir: Path, recipe: Recipe | None) -> MergedWeights:
    if recipe is None or recipe.trainer.lora is None:
        raise CheckpointError(f"checkpoint {entry.path} holds adapters, and the recipe of the run has none")
    held, published = recipe.trainer.dtype, recipe.handoff.dtype or recipe.trainer.dtype
    dtypes = {"held": getattr(torch, held), "published": getattr(torch, published)}
    return MergedWeights(entry, model, model_dir, recipe.trainer.lora, **dtypes)


class _Weights:
    """Reads tensors of a model from a checkpoint that has all of them."""

    def __init__(self, entry: CheckpointEntry, model: Decoder) -> None:
        """See that the entry fits ``model`` (CheckpointError)."""
        self._entry, self._own = entry, model_tensors(model)
        held = _metadata(entry)
        for name, tensor in self._own.items():
            value = held.get(name)
            found = tuple(value.size) if isinstance(value, TensorStorageMetadata) else "nothing"
            if found != tuple(tensor.shape):
                what = f"{name} is {found}, not {tuple(tensor.shape)}"
                raise CheckpointError(f"{entry.path} does not fit the model: {what}")
        self.shapes = {name: tensor.shape for name, tensor in self._own.items()}

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors of the model, whole."""
        state = {"model": {name: torch.empty(self.shapes[name], dtype=self._own[name].dtype) for name in names}}
        load_alone(state, self._entry.trainer_dir)
        for name in list(state["model"]):
            yield name, state["model"].pop(name)


def _portions(
    weights: _Weights | MergedWeights, model: Decoder, dtype: torch.dtype, shard_bytes: int
) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Read one file's tensors after the other; yields the name of each file, and its tensors by published names."""
    # they keep their dtype: a rounded bias of a router chooses other experts
    buffers = {name for name, _ in model.named_buffers()}
    for number, names in enumerate(_shards(weights.shapes, dtype, shard_bytes), start=1):
        tensors: dict[str, torch.Tensor] = {}
        for name, whole in weights.read(names):
            for hf_name, tensor in model.adapter.to_hf(name, whole):
                # a copy of its own: views of one parameter share memory, which a safetensors file cannot say
                kind = tensor.dtype if name in buffers else dtype
                tensors[hf_name] = tensor.to(kind, copy=True).contiguous()
        yield f"model-{number:05d}.safetensors", tensors


def _save(tensors: dict[str, torch.Tensor], path: Path) -> int:
    """Write a safetensors file with the mode of the umask: ``save_file`` makes it readable by its owner only.

    On disk on return, which is the bytes of the tensors.
    """
    path.touch(exist_ok=False)
    mode = stat.S_IMODE(path.stat().st_mode)
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(mode)
    _fsync(path)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _metadata(entry: CheckpointEntry) -> dict[str, Any]:
    """Return the checkpoint's metadata of the model's tensors, by name."""
    metadata = FileSystemReader(entry.trainer_dir).read_metadata().state_dict_metadata
    return {key.removeprefix(_PREFIX): value for key, value in metadata.items() if key.startswith(_PREFIX)}


def _carried(entry: CheckpointEntry) -> list[CarriedTensor]:
    """Return the tensors of a published model that the checkpoint holds besides the parameters of its decoder."""
    return [
        CarriedTensor(name.removeprefix(CARRIED), str(value.properties.dtype).removeprefix("torch."), tuple(value.size))
        for name, value in _metadata(entry).items()
        if name.startswith(CARRIED) and isinstance(value, TensorStorageMetadata)
    ]


def _shards(shapes: Mapping[str, torch.Size], dtype: torch.dtype, shard_bytes: int) -> Iterator[list[str]]:
    """Yield names of tensors, in portions of about ``shard_bytes`` of output."""
    portion: list[str] = []
    size = 0
    for name, shape in shapes.items():
        own = shape.numel() * dtype.itemsize
        if portion and size + own > shard_bytes:
            yield portion
            portion, size = [], 0
        portion.append(name)
        size += own
    yield portion


def _copy_companions(model_dir: Path, output: Path, *, wrapper: bool) -> None:
    """Copy small files; those of processors only for a ``wrapper``, because a language model has none."""
    for path in sorted(model_dir.iterdir()):
        small = path.is_file() and path.stat().st_size <= _COMPANION_BYTES and path.name != "config.json"
        if path.name in WRAPPER_FILES and not wrapper:
            continue
        if small and path.suffix in _COMPANION_SUFFIXES and is_true_of_copies(path.name):
            shutil.copyfile(path, output / path.name)
            _fsync(output / path.name)


def _fsync(path: Path) -> None:
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


def _choose(run: RunDir, step: int | None) -> CheckpointEntry:
    ledger = CheckpointLedger(run.checkpoints_dir)
    if step is not None:
        if step not in ledger.steps():
            there = ", ".join(map(str, ledger.steps())) or "none"
            raise UsageError(f"{run.name} has no checkpoint of step {step}\n    hint: there are {there}")
        entry = ledger.open(step)
        entry.verify()
        return entry
    choice = ledger.newest_verified()
    for skipped, reason in choice.skipped:
        print(visible(f"checkpoint of step {skipped} is skipped: {reason}"), file=sys.stderr)
    if choice.entry is None:
        raise UsageError(f"{run.name} has no valid checkpoint\n    hint: hpcrl checkpoint ls {reference(run)}")
    return choice.entry


def _export(arguments: argparse.Namespace) -> None:
    run = RunDir(arguments.run)
    recipe = run.recipe()
    dtype = arguments.dtype or recipe.trainer.dtype
    if dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype} is not one of {', '.join(DTYPES)}")
    model_dir = arguments.model_dir or Path(recipe.model.path)
    if not (model_dir / "config.json").is_file():
        raise UsageError(
            f"{model_dir} has no config.json: the configuration of the exported model would be missing\n"
            "    hint: --model-dir, another copy of the model that the run began with"
        )
    entry = _choose(run, arguments.step)
    total = export_checkpoint(entry, model_dir, arguments.output, dtype=dtype, recipe=recipe)
    print(f"step {entry.step} of {run.name}: {total:,} bytes of {dtype} tensors", file=sys.stderr)
    if recipe.trainer.lora is not None:
        _tell_unread(load_arch(model_dir), recipe.trainer.lora.targets)
    print(arguments.output)


def _tell_unread(arch: ModelArch, targets: Sequence[str] | None) -> None:
    """Log which adapters of the run's published versions PEFT would ignore; this export has all of them."""
    if unread := unread_by_peft(arch.facts, targets):
        what = " and ".join(unread)
        print(
            f"adapters of {what} are merged here; PEFT leaves them out where it reads published versions of this run "
            "(huggingface/peft#3711)",
            file=sys.stderr,
        )


def main() -> int:
    """Export according to the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="hpcrl checkpoint export")
    parser.add_argument("run", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--step", type=int)
    parser.add_argument("--dtype")
    parser.add_argument("--model-dir", type=Path)
    try:
        _export(parser.parse_args())
    except HpcrlError as error:
        print(visible(f"hpcrl: {error}"), file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(visible(f"hpcrl: the export failed: {error}\n    no files were left behind"), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
