"""What small files of a start model may say beside weights that this project wrote: nothing that is no longer true."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hpcrl.models.mtp import config_of_tensors

__all__ = ["is_true_of_copies", "written_config"]

_STORAGE_KEYS = ("quantization_config", "compression_config")
"""They say how numbers of the start model are stored."""
_DTYPE_KEYS = ("torch_dtype", "dtype")
_OF_STORAGE = frozenset(
    {"hf_quant_config.json", "quantize_config.json", "quant_config.json", "quantization_config.json"}
)
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
