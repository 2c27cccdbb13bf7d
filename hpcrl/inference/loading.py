"""Weights into a `Qwen3Moe`: from a model directory at the start, from a hand-off later."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hpcrl.errors import HandoffError, UsageError
from hpcrl.models.arch import ModelArch, load_arch
from hpcrl.trainer.models.hf import load_hf_tensors
from hpcrl.trainer.models.qwen3_moe import Qwen3Moe
from hpcrl.weights import Handoff, TensorRecord

__all__ = ["DTYPES", "check_fits", "load_model", "read_tensors"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_model(model_dir: Path, dtype: str) -> Qwen3Moe:
    """Read a published model directory.

    Parameters
    ----------
    model_dir:
        ``config.json`` and ``*.safetensors``.
    dtype:
        ``float32``, ``bfloat16``, or ``auto`` for what ``config.json`` says.

    Raises
    ------
    UsageError
        It is no model directory, or not of a model this engine runs.
    """
    try:
        arch = load_arch(model_dir)
        config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(f"{model_dir} is no model directory: it has no config.json") from error
    except (ValueError, OSError) as error:
        raise UsageError(f"{model_dir} cannot be read: {error}") from error
    if dtype == "auto":
        dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    if dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise UsageError(f"{model_dir} has no *.safetensors files")
    model = Qwen3Moe(arch).to(DTYPES[dtype]).requires_grad_(False).eval()
    try:
        load_hf_tensors(model, arch, _stored_tensors(files))
    except (ValueError, SafetensorError) as error:
        raise UsageError(f"{model_dir}: {error}") from error
    return model


def _stored_tensors(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    for file in files:
        with safe_open(file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 - a safetensors handle is no mapping
                yield name, shard.get_tensor(name)


def check_fits(handoff: Handoff, arch: ModelArch) -> None:
    """Compare a hand-off's manifest with a model, before any weight is read.

    Raises
    ------
    HandoffError
        It is no full publication, or tensors are missing, unknown or of another shape.
    """
    if handoff.manifest.kind != "full":
        raise HandoffError(f"{handoff.path} is a {handoff.manifest.kind!r} publication; this engine loads full ones")
    records = handoff.manifest.tensors
    expected = {spec.name: spec.shape for spec in arch.tensors()}
    problems = [f"{name} is missing" for name in expected if name not in records]
    problems += [f"{name} is unknown" for name in records if name not in expected]
    problems += [
        f"{name} has shape {tuple(record.shape)}, not {expected[name]}"
        for name, record in records.items()
        if name in expected and tuple(record.shape) != expected[name]
    ]
    if problems:
        shown = "; ".join(problems[:3]) + (f"; and {len(problems) - 3} more" if len(problems) > 3 else "")
        raise HandoffError(f"{handoff.path} does not fit the model: {shown}")


def read_tensors(handoff: Handoff, *, content: bool) -> Iterator[tuple[str, Tensor]]:
    """Read the tensors of a hand-off.

    Files are read, not mapped: a mapped file that is truncated or withdrawn on a shared filesystem kills the
    process with SIGBUS, a read gives an error.

    Parameters
    ----------
    handoff:
        Opened and checked.
    content:
        Compare each tensor's bytes with the hash in the manifest.

    Raises
    ------
    HandoffError
        A file is missing or short, or bytes differ.
    """
    by_file: dict[str, list[tuple[str, TensorRecord]]] = {}
    for name, record in handoff.manifest.tensors.items():
        by_file.setdefault(record.file, []).append((name, record))
    for file, records in by_file.items():
        path = handoff.path / file
        try:
            with path.open("rb") as stream:
                for name, record in sorted(records, key=lambda item: item[1].offset):
                    stream.seek(record.offset)
                    data = bytearray(record.bytes)
                    if stream.readinto(data) != record.bytes:
                        raise HandoffError(f"{path} ends inside tensor {name}")
                    if content and xxhash.xxh3_128_hexdigest(data) != record.xxh3_128:
                        raise HandoffError(f"{path}: tensor {name} does not have the content that the manifest says")
                    yield name, torch.frombuffer(data, dtype=getattr(torch, record.dtype)).view(record.shape)
        except OSError as error:
            raise HandoffError(f"{path} cannot be read: {error}") from error
