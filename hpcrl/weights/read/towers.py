"""Tensors of a model that also sees which are not of its language model: vision tower and projector."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hpcrl.weights.read.model_files import ModelFiles, StoredBlock
from hpcrl.weights.read.wrapped_names import language_model_name, wrapped_type

_CARRIED = ("float32", "float16", "bfloat16", "int64", "int32")
"""Dtypes that need no ``quantization_config``, which exports do not have."""


def read_tower(model_dir: Path) -> dict[str, StoredBlock]:
    """Return the tensors outside of the language model, by their names in the files; none without a wrapper.

    Raises
    ------
    UsageError
        As `ModelFiles`.
    """
    if wrapped_type(model_dir) is None:
        return {}
    with ModelFiles(model_dir, whole=True) as files:
        return {name: block for name, block in files.tensors.items() if language_model_name(name) is None}


def uncarried_problem(tower: Mapping[str, StoredBlock]) -> str:
    """Return why tensors of a tower cannot be put into an export; an empty text where they can."""
    for name, block in tower.items():
        if block.dtype not in _CARRIED:
            return f"tensor {name!r} of {block.file} has dtype {block.dtype}, and exports are not quantised"
    return ""
