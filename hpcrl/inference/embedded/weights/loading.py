"""Weights into a `Decoder`: from a model directory at the start, from a hand-off later."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from hpcrl.errors import HandoffError, UsageError
from hpcrl.inference.adapters import Adapter, KeptBase, as_tensor
from hpcrl.modeling.checkpoint_io.load import load_model_dir
from hpcrl.modeling.decoder import Decoder
from hpcrl.modeling.fp8.quantiser import dequantise
from hpcrl.modeling.hf import published_tensors
from hpcrl.modeling.spec import build_model
from hpcrl.models.arch import ModelArch, load_arch, read_model_config
from hpcrl.models.mtp import is_mtp_tensor
from hpcrl.weights import TensorRecord
from hpcrl.weights.format.layout import PublishedTensor
from hpcrl.weights.format.manifest import OpenedVersion
from hpcrl.weights.format.quantise import FP8_DTYPE, scale_tensor
from hpcrl.weights.read.adapters import Contents
from hpcrl.weights.read.assemble import ServedVersion
from hpcrl.weights.read.model_directory import find_weight_files
from hpcrl.weights.read.subscriber import Reading

_log = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_model(model_dir: Path, dtype: str, *, empty: bool = False) -> Decoder:
    """Read a published model directory.

    Parameters
    ----------
    model_dir:
        ``config.json`` and ``*.safetensors``.
    dtype:
        ``float32``, ``bfloat16``, or ``auto`` for that of ``config.json``.
    empty:
        Leave the weights unset: another source fills them.

    Raises
    ------
    UsageError
        It is not a model directory, or its model is not one that this engine runs.
    """
    try:
        arch = load_arch(model_dir)
        config = read_model_config(model_dir)
    except FileNotFoundError as error:
        raise UsageError(f"{model_dir} is not a model directory: it has no config.json") from error
    except (ValueError, OSError) as error:
        raise UsageError(f"{model_dir} cannot be read: {error}") from error
    if dtype == "auto":
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    model = build_model(arch, device="cpu", dtype=DTYPES[dtype]).requires_grad_(False).eval()
    if empty:
        return model
    try:
        load_model_dir(model, model.adapter, model_dir)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if ignored := find_weight_files(model_dir).ignored:
        _log.warning("not read in %s, as they are not the model's: %s", model_dir, ", ".join(ignored))
    return model


def check_fits(handoff: OpenedVersion, arch: ModelArch) -> None:
    """Compare the manifest of a hand-off (for an adapter: of its base) with a model, before any weight is read.

    Tensors of multi-token prediction may be there: this engine does not speculate, and leaves them out.

    Raises
    ------
    HandoffError
        Tensors are missing, unknown or of another shape.
    """
    records = handoff.manifest.tensors
    expected = {spec.name: spec.shape for spec in arch.tensors()}
    odd = [name for name, r in records.items() if r.dtype == FP8_DTYPE and len(r.shape) != 2]
    if odd:
        raise HandoffError(f"{handoff.path} does not fit the model: {odd[0]} is in FP8 but is not a matrix")
    scales = {scale.name: scale.shape for name in records if (scale := _scale_of(name, records)) is not None}
    expected |= scales
    problems = [f"{name} is missing" for name in expected if name not in records]
    mtp = partial(is_mtp_tensor, layers=arch.num_hidden_layers, modules=arch.num_nextn_predict_layers)
    problems += [
        f"{name} has dtype {records[name].dtype}, not float32"
        for name in scales
        if name in records and records[name].dtype != "float32"
    ]
    problems += [f"{name} is unknown" for name in records if name not in expected and not mtp(name)]
    problems += [
        f"{name} has shape {tuple(record.shape)}, not {expected[name]}"
        for name, record in records.items()
        if name in expected and tuple(record.shape) != expected[name]
    ]
    if problems:
        shown = "; ".join(problems[:3]) + (f"; and {len(problems) - 3} more" if len(problems) > 3 else "")
        raise HandoffError(f"{handoff.path} does not fit the model: {shown}")


def _scale_of(name: str, records: Mapping[str, TensorRecord]) -> PublishedTensor | None:
    """Return the tensor of scales that a quantised tensor needs; None if it is not quantised."""
    if records[name].dtype != FP8_DTYPE:
        return None
    return scale_tensor(name, records[name].shape)


def read_model_tensors(reading: Reading, served: ServedVersion | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a hand-off that `check_fits`, one at a time; quantised ones are converted to float32.

    They have published names and shapes and are on the host; scales are not yielded.

    Parameters
    ----------
    served:
        Weights that this engine has already; then only deltas against them are read.

    Raises
    ------
    HandoffError
        See `hpcrl.weights.read.subscriber.Reading.read`.
    """
    records = reading.handoff.manifest.tensors
    waiting: dict[str, Tensor] = {}
    for stored in reading.tensors(served):
        name, tensor = stored.name, as_tensor(stored)
        weight = name.removesuffix("_scale_inv")
        scale = _scale_of(weight, records) if weight in records else None
        if scale is None:
            yield name, tensor
        elif weight in waiting or scale.name in waiting:
            quantised, scales = (waiting.pop(weight), tensor) if name != weight else (tensor, waiting.pop(scale.name))
            yield weight, dequantise(quantised, scales)
        else:
            waiting[name] = tensor


def adapted_tensors(
    reading: Reading,
    adapter: Adapter,
    base: KeptBase,
    contents: Contents | None = None,
    model: Decoder | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of a base whose manifest `check_fits`, with an adapter merged into them.

    By published names, in published shapes, on the host.

    Parameters
    ----------
    reading:
        Reading of the adapter.
    base:
        Cache of base tensors that were read before; those that the adapter changes are kept there.
    contents, model:
        Contents that this engine has already; only tensors that may differ from them are merged.

    Raises
    ------
    HandoffError
        See `hpcrl.weights.read.subscriber.Reading.read` and `Adapter.merged`.
    """
    different = adapter.contents.different_from(contents)
    if different is None or model is None:
        different = frozenset(reading.chain[-2].manifest.tensors)
    else:
        yield from ((name, tensor) for name, tensor in _published(model).items() if name not in different)
    tensors = base.tensors(reading, adapter.contents.base, different, adapter.contents.changed)
    yield from adapter.merged(tensors)


def model_bytes(model: Decoder) -> Callable[[str, TensorRecord], bytearray | None]:
    """Return a function that copies the bytes of a published tensor of ``model``; it returns None for another dtype."""
    tensors = _published(model)

    def copy(name: str, record: TensorRecord) -> bytearray | None:
        tensor = tensors.get(name)
        if tensor is None or tensor.dtype != getattr(torch, record.dtype) or tuple(tensor.shape) != record.shape:
            return None
        return bytearray(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)

    return copy


def _published(model: Decoder) -> dict[str, Tensor]:
    """Return the tensors of ``model`` by their published names, as views."""
    return dict(published_tensors(model, model.adapter))
