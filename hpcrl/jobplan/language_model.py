"""The language model of a published model that also sees, as a directory of its own family: no weights are computed.

Trainer and engines read the names and the configuration of a family, and not those of wrappers around it. Tensors are
copied by the byte under their own names; towers, projectors and processors are left out.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hpcrl.errors import UsageError
from hpcrl.jobplan.start_model import look_at_directory
from hpcrl.models.arch import arch_from_config, read_model_config
from hpcrl.models.wrapped import WRAPPER_FILES
from hpcrl.models.written import small_files
from hpcrl.storage.files import StagedDirectory, atomic_write
from hpcrl.weights.read.model_directory import INDEX
from hpcrl.weights.read.model_files import ModelFiles, StoredBlock
from hpcrl.weights.read.wrapped_names import language_model_name, wrapped_type
from hpcrl.weights.write.copied_tensors import write_copied_tensors


class Extracted(NamedTuple):
    """A language model that was written.

    Attributes
    ----------
    path, tensors:
        Its directory, and how many tensors are in it.
    left_out:
        Numbers of tensors that were left out, by the first part of their names.
    """

    path: Path
    tensors: int
    left_out: Mapping[str, int]


def extract_language_model(model_dir: Path, target: Path) -> Extracted:
    """Write the language model of ``model_dir`` to ``target``, which must not be there.

    Raises
    ------
    UsageError
        ``model_dir`` wraps no language model of a known family, cannot be read, or what would be written is not whole;
        ``target`` is there.
    OSError
        The filesystem refused.
    """
    if target.exists():
        raise UsageError(f"{target} exists already\n    hint: use it as it is, or give another --output")
    config = _own_config(model_dir)
    with ModelFiles(model_dir, whole=True) as whole:
        # a weight in MXFP4 is stored as its blocks and scales
        names = [name for name, block in whole.tensors.items() if block.width]
    left_out = Counter(_beginning(name) for name in names if language_model_name(name) is None)
    stage = StagedDirectory(target, token=f"extract-{os.getpid()}")
    stage.create()
    try:
        with ModelFiles(model_dir) as files:
            count = _write_tensors(stage.path, files)
        _write_small_files(model_dir, stage.path, config)
        if problems := look_at_directory(stage.path).problems:
            what = problems[0][0].replace(str(stage.path), str(target))
            raise UsageError(f"the language model of {model_dir} would be incomplete: {what}")
        stage.commit()
    except BaseException:
        stage.discard()
        raise
    return Extracted(target, count, dict(left_out))


def _own_config(model_dir: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = read_model_config(model_dir)
        if wrapped_type(model_dir) is None:
            raise UsageError(f"{model_dir} wraps no language model: its config.json has no text_config")
        arch_from_config(config)
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{model_dir / 'config.json'}: {error}") from error
    return config


def _beginning(name: str) -> str:
    first, _, rest = name.partition(".")
    return f"{first}.{rest.partition('.')[0]}" if first == "model" else first


def _write_tensors(target: Path, files: ModelFiles) -> int:
    """Write a file for each of the model's that has tensors of the language model, and an index; returns how many."""
    by_file: dict[Path, dict[str, StoredBlock]] = {}
    for name, block in files.tensors.items():
        if block.width:
            by_file.setdefault(block.file, {})[name] = block
    placed: dict[str, str] = {}
    # not the name of the only file of a model: with it readers would ignore the index
    for number, (_, tensors) in enumerate(sorted(by_file.items()), start=1):
        file = f"model-{number:05d}-of-{len(by_file):05d}.safetensors"
        write_copied_tensors(target / file, tensors, files)
        placed |= dict.fromkeys(tensors, file)
    size = sum(block.nbytes for tensors in by_file.values() for block in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(placed.items()))}
    _write_json(target / INDEX, index)
    return len(placed)


def _write_small_files(model_dir: Path, target: Path, config: Mapping[str, Any]) -> None:
    _write_json(target / "config.json", config)
    for path in small_files(model_dir):
        if path.name not in WRAPPER_FILES:
            atomic_write(target / path.name, path.read_bytes())


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    atomic_write(path, (json.dumps(document, indent=2) + "\n").encode())
