"""Safetensors files of a Hugging Face model directory that belong to the model, and those that do not.

``model.safetensors.index.json`` decides where it exists, as for transformers and vLLM. Where it contradicts another
file, readers would load different tensors, so the directory is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from hpcrl.errors import UsageError

INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.safetensors")
_MAX_INDEX_BYTES = 512 << 20
_OTHER_FORMATS = ("consolidated", "adapter_model")
"""Prefixes of files that hold a model in Mistral's own layout, or an adapter."""


class WeightFiles(NamedTuple):
    """Files of a model.

    Attributes
    ----------
    paths:
        Files to read, sorted.
    placed:
        File of each tensor by the index; empty without an index.
    ignored:
        Names of files with weights that are not read, sorted.
    """

    paths: tuple[Path, ...]
    placed: Mapping[str, Path]
    ignored: tuple[str, ...]


def find_weight_files(model_dir: Path) -> WeightFiles:
    """Find the files to read; no file but the index is opened.

    Without an index all safetensors files are the model together, as for vLLM: some uploads have the tensors of
    multi-token prediction in a file of their own.

    Raises
    ------
    UsageError
        There are none, the index is damaged, names files that are missing or lie outside of the directory, or
        contradicts ``model.safetensors``.
    """
    present = sorted({path.name for pattern in _OTHER_WEIGHTS for path in model_dir.glob(pattern)})
    own = [path for path in sorted(model_dir.glob("*.safetensors")) if not path.name.startswith(_OTHER_FORMATS)]
    placed: dict[str, Path] = {}
    # a broken link is an unreadable index, not a missing one
    if (model_dir / INDEX).exists() or (model_dir / INDEX).is_symlink():
        placed = {name: model_dir / file for name, file in _read_index(model_dir).items()}
        paths = sorted(set(placed.values()))
        if _SINGLE in present and model_dir / _SINGLE not in paths:
            raise UsageError(
                f"{model_dir} has {_SINGLE} and an index, {INDEX}, that does not name it: transformers reads the "
                "first, vLLM what the index names\n    hint: remove the one that is not the model"
            )
    else:
        paths = own
    names = {path.relative_to(model_dir).as_posix() for path in paths}
    ignored = tuple(name for name in present if name not in names)
    if not paths:
        beside = f" (there is {', '.join(ignored[:3])}, which hpcrl does not read)" if ignored else ""
        raise UsageError(f"{model_dir} has no *.safetensors{beside}: it is not a model directory")
    return WeightFiles(tuple(paths), placed, ignored)


def _read_index(model_dir: Path) -> dict[str, str]:
    path = model_dir / INDEX
    try:
        if (size := path.stat().st_size) > _MAX_INDEX_BYTES:
            raise ValueError(f"it has {size:,} bytes")
        document = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    found = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(found, dict) or not found or not all(isinstance(name, str) for name in found.values()):
        raise UsageError(f"{path} has no weight_map of tensors and files")
    for tensor, name in found.items():
        parts = PurePosixPath(name)
        if parts.is_absolute() or ".." in parts.parts or parts.suffix != ".safetensors" or "\0" in name:
            raise UsageError(
                f"{path} says that tensor {tensor!r} is in {name!r}: that is not a safetensors file of this directory"
            )
    if lost := sorted(name for name in set(found.values()) if not (model_dir / name).is_file()):
        some = ", ".join(lost[:3]) + (f" and {len(lost) - 3} more" if len(lost) > 3 else "")
        raise UsageError(f"{model_dir} lacks {some}, which its index names")
    return found
