"""Swept values of runs, in words."""

from __future__ import annotations

import json
from collections.abc import Sequence


def value_words(text: str) -> str:
    """Return a swept value for a person: ``3e-06`` as it is, a text without quotes."""
    value = json.loads(text)
    return value if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else text


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Return a short and unique name of each key for the head of a column: ``learning_rate``."""
    names = {}
    for key in keys:
        parts = key.split(".")
        for count in range(1, len(parts) + 1):
            name = ".".join(parts[-count:])
            if sum(f".{other}".endswith(f".{name}") for other in keys) == 1:
                break
        names[key] = name
    return names
