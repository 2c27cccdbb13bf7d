"""Small files of a start model that stay valid with weights that this project wrote."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hpcrl.models.mtp import config_of_tensors

_STORAGE_KEYS = ("quantization_config", "compression_config")
"""Keys that describe the storage of the start model's numbers."""
_DTYPE_KEYS = ("torch_dtype", "dtype")
_OF_STORAGE = frozenset(
    {"hf_quant_config.json", "quantize_config.json", "quant_config.json", "quantization_config.json"}
)
_SMALL_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py")
_SMALL_BYTES = 512 << 20
_OF_OTHERS = frozenset({"adapter_config.json", "trainer_state.json", "manifest.json"})
"""Files that describe an adapter of the model, or its training: readers would apply them to the weights."""


def written_config(
    config: Mapping[str, Any], names: Iterable[str], *, dtype: str, quantisation: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the ``config`` of a start model, valid for a model with the tensors ``names``.

    Parameters
    ----------
    dtype:
        Dtype of the tensors, or the dtype that quantised ones represent.
    quantisation:
        Quantisation of the written tensors; None: they are not quantised, whatever the start model was.
    """
    own = config_of_tensors(config, names)
    for key in (*_STORAGE_KEYS, *_DTYPE_KEYS):
        own.pop(key, None)
    # the sub-configs of multimodal models repeat these keys
    for key, group in own.items():
        if isinstance(group, Mapping) and key.endswith("_config"):
            kept = {name: value for name, value in group.items() if name not in _STORAGE_KEYS}
            own[key] = {name: dtype if name in _DTYPE_KEYS else value for name, value in kept.items()}
    own["dtype"] = dtype
    if quantisation is not None:
        own["quantization_config"] = dict(quantisation)
    return own


def is_true_of_copies(file: str) -> bool:
    """Return whether a start model's small file ``file`` stays true of copies.

    It does where it describes neither the storage nor the origin of the model's tensors.
    """
    return file not in _OF_STORAGE | _OF_OTHERS and not file.endswith((".index.json", "manifest.json"))


def small_files(model_dir: Path) -> Iterator[Path]:
    """Yield the small files that are valid for other weights of the model, too; not its ``config.json``."""
    for path in sorted(model_dir.iterdir()):
        own = path.suffix in _SMALL_SUFFIXES and is_true_of_copies(path.name) and path.name != "config.json"
        if own and path.is_file() and path.stat().st_size <= _SMALL_BYTES:
            yield path
