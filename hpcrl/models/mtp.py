"""Tensors of multi-token prediction in a published model: which they are, and what a config says of a model without."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_OWN = "mtp."
"""Before the names of modules that do not count on after the last layer (Nemotron 3)."""
_COUNTS = ("num_nextn_predict_layers", "num_mtp_modules")
"""Keys of the number of modules in configs; the latter is MiniMax-M2's."""


def is_mtp_tensor(name: str, *, layers: int, modules: int) -> bool:
    """Return whether the published tensor ``name`` belongs to a module of multi-token prediction.

    Parameters
    ----------
    layers:
        Decoder layers of the model; the numbers of the modules follow the last one.
    modules:
        Number of modules by the model's config.
    """
    if name.startswith(_OWN):
        return modules > 0
    found = _LAYER.match(name)
    return found is not None and layers <= int(found[1]) < layers + modules


def config_of_tensors(config: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return ``config``, valid for a model with the tensors ``names``: without the modules that it lacks."""
    count = max(config.get(key) or 0 for key in _COUNTS)
    if not count:
        return dict(config)
    # hybrids list their layers, and may not count them
    layers = config.get("num_hidden_layers") or len(config["layers_block_type"])
    if any(is_mtp_tensor(name, layers=layers, modules=count) for name in names):
        return dict(config)
    return {**config, **dict.fromkeys(config.keys() & set(_COUNTS), 0)}
