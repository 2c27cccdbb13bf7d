"""What small files of a start model may say beside weights that this project wrote: nothing that is no longer true."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hpcrl.models.mtp import config_of_tensors

__all__ = ["is_true_of_copies", "small_files", "written_config"]

_STORAGE_KEYS = ("quantization_config", "compression_config")
"""They say how numbers of the start model are stored."""
_DTYPE_KEYS = ("torch_dtype", "dtype")
_OF_STORAGE = frozenset(
    {"hf_quant_config.json", "quantize_config.json", "quant_config.json", "quantization_config.json"}
)
_SMALL_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py")
_SMALL_BYTES = 512 << 20
_OF_OTHERS = frozenset({"adapter_config.json", "trainer_state.json", "manifest.json"})
"""They describe an adapter beside the model, or the training that made it: readers would apply them to the weights."""


def written_config(
    config: Mapping[str, Any], names: Iterable[str], *, dtype: str, quantization: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """``config`` of a start model as it is true of a model with the tensors ``names``.

    Parameters
    ----------
    dtype:
        Of the tensors, or of what stands behind quantised ones.
    quantization:
        How the written tensors are quantised; None: they are not, whatever the start model was.
    """
    own = config_of_tensors(config, names)
    for key in (*_STORAGE_KEYS, *_DTYPE_KEYS):
        own.pop(key, None)
    # the groups of models that see or hear repeat these keys
    for key, group in own.items():
        if isinstance(group, Mapping) and key.endswith("_config"):
            kept = {name: value for name, value in group.items() if name not in _STORAGE_KEYS}
            own[key] = {name: dtype if name in _DTYPE_KEYS else value for name, value in kept.items()}
    own["dtype"] = dtype
    if quantization is not None:
        own["quantization_config"] = dict(quantization)
    return own


def is_true_of_copies(file: str) -> bool:
    """Whether the small file ``file`` of a start model says nothing of how its tensors are stored or were made."""
    return file not in _OF_STORAGE | _OF_OTHERS and not file.endswith((".index.json", "manifest.json"))


def small_files(model_dir: Path) -> Iterator[Path]:
    """Files beside the weights that are as true of other weights of the model; not its ``config.json``."""
    for path in sorted(model_dir.iterdir()):
        own = path.suffix in _SMALL_SUFFIXES and is_true_of_copies(path.name) and path.name != "config.json"
        if own and path.is_file() and path.stat().st_size <= _SMALL_BYTES:
            yield path
