"""Differences of a small recipe from the one that it extends, and the reasons that stand in its file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from hpcrl.config.load import Loaded, leaves
from hpcrl.config.recipe import Recipe


def values(recipe: Recipe) -> dict[str, Any]:
    """Every resolved value by its key; nothing is left out where it is none."""
    return {".".join(map(str, path)): value for path, value in leaves(recipe)}


def differences(small: Recipe, full: Recipe) -> list[str]:
    """Keys that only one of the two has, or that have other values."""
    ours, theirs = values(small), values(full)
    missing = object()
    keys = dict.fromkeys([*ours, *theirs])
    return [key for key in keys if ours.get(key, missing) != theirs.get(key, missing)]


def declared(key: str, allowed: Sequence[str]) -> list[str]:
    """Those of ``allowed`` that allow a difference."""
    return [prefix for prefix in allowed if key == prefix or fnmatchcase(key, f"{prefix}.*")]


def reasons(loaded: Loaded[Recipe], keys: Mapping[str, str]) -> dict[str, str]:
    """The line of comment above each key in its file."""
    found = {}
    for key in keys:
        path, _, line = loaded.where(key).rpartition(":")
        found[key] = Path(path).read_text().splitlines()[int(line) - 2].strip()
    return found
