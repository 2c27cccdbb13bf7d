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
from hpcrl.modeling.decoder import Decoder
from hpcrl.modeling.fp8.quantiser import dequantise
from hpcrl.modeling.hf import published_tensors
from hpcrl.modeling.load import load_model_dir
from hpcrl.modeling.spec import build_model
from hpcrl.models.arch import ModelArch, load_arch, read_model_config
from hpcrl.models.mtp import is_mtp_tensor
from hpcrl.weights import Handoff, TensorRecord
from hpcrl.weights.format.adapters import Contents
from hpcrl.weights.format.layout import PublishedTensor
from hpcrl.weights.format.quantize import FP8_DTYPE, scale_tensor
from hpcrl.weights.read.assemble import ServedVersion
from hpcrl.weights.read.model_directory import find_weight_files
from hpcrl.weights.read.subscriber import Reading

__all__ = ["DTYPES", "adapted_tensors", "check_fits", "load_model", "model_bytes", "read_tensors"]

_log = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_model(model_dir: Path, dtype: str, *, empty: bool = False) -> Decoder:
    """Read a published model directory.

    Parameters
    ----------
    model_dir:
        ``config.json`` and ``*.safetensors``.
    dtype:
        ``float32``, ``bfloat16``, or ``auto`` for what ``config.json`` says.
    empty:
        Leave the weights unset: they come from somewhere else.

    Raises
    ------
    UsageError
        It is no model directory, or not of a model this engine runs.
    """
    try:
        arch = load_arch(model_dir)
        config = read_model_config(model_dir)
    except FileNotFoundError as error:
        raise UsageError(f"{model_dir} is no model directory: it has no config.json") from error
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


def check_fits(handoff: Handoff, arch: ModelArch) -> None:
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
        raise HandoffError(f"{handoff.path} does not fit the model: {odd[0]} is in FP8 and no matrix")
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
    """The scales that a tensor needs; None where it is not quantised."""
    if records[name].dtype != FP8_DTYPE:
        return None
    return scale_tensor(name, records[name].shape)


def read_tensors(reading: Reading, served: ServedVersion | None = None) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a hand-off that `check_fits`, one at a time; what is quantised is brought back to float32.

    By published names, in published shapes, on the host; scales do not come.

    Parameters
    ----------
    served:
        Weights that this engine has already; deltas against them are all that is read then.

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
    """All tensors of a base whose manifest `check_fits`, with an adapter merged into them.

    By published names, in published shapes, on the host.

    Parameters
    ----------
    reading:
        Of the adapter.
    base:
        What was read of its base before; what it changes is kept there.
    contents, model:
        What this engine has already; only tensors that may differ from it are merged.

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
    """Gives copies of the bytes of published tensors of ``model``; None where its dtype is another."""
    tensors = _published(model)

    def copy(name: str, record: TensorRecord) -> bytearray | None:
        tensor = tensors.get(name)
        if tensor is None or tensor.dtype != getattr(torch, record.dtype) or tuple(tensor.shape) != record.shape:
            return None
        return bytearray(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)

    return copy


def _published(model: Decoder) -> dict[str, Tensor]:
    """The tensors of ``model`` by their published names, as views."""
    return dict(published_tensors(model, model.adapter))
