"""Tensors of a model that also sees which are not of its language model: vision tower and projector."""

from __future__ import annotations

from pathlib import Path

from hpcrl.weights.read.model_files import ModelFiles, StoredBlock
from hpcrl.weights.read.wrapped_names import language_model_name, wrapped_type

__all__ = ["read_tower"]


def read_tower(model_dir: Path) -> dict[str, StoredBlock]:
    """Return tensors beside the language model, by their names in the files; none where nothing is wrapped.

    Raises
    ------
    UsageError
        As `ModelFiles`.
    """
    if wrapped_type(model_dir) is None:
        return {}
    with ModelFiles(model_dir, whole=True) as files:
        return {name: block for name, block in files.tensors.items() if language_model_name(name) is None}
