"""What a file means on top of those that it ``extends``: trees of values and where each was written."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from hpcrl.config.yamltree import KeyPath, Origins, parse_file
from hpcrl.errors import ConfigError, Finding

__all__ = ["with_bases"]

_MAX_EXTENDS = 8


def with_bases(
    source: Path, what: str, find: Callable[[str, Collection[Path]], Path]
) -> tuple[dict[str, Any], Origins]:
    """The tree of a file on top of what it extends, nearest last.

    Parameters
    ----------
    what:
        Kind of file.
    find:
        The file that a name means, given those (resolved) that it has led to.

    Raises
    ------
    ConfigError
        A file cannot be read or is not there, or they go round in a circle.
    """
    chain: list[tuple[dict[str, Any], Origins]] = []
    seen: list[Path] = []
    path = source
    while True:
        if path.resolve() in seen or len(seen) == _MAX_EXTENDS:
            names = " -> ".join(p.name for p in (*seen, path))
            raise ConfigError([Finding(str(source), "extends", f"goes round in a circle or too deep: {names}")])
        seen.append(path.resolve())
        tree, origins = parse_file(path)
        base = tree.pop("extends", None)
        chain.append((tree, origins))
        if base is None:
            break
        where = origins[("extends",)]
        if not isinstance(base, str):
            raise ConfigError([Finding(where, "extends", f"must be the path or name of one {what}")])
        beside = path.parent / base
        try:
            path = beside if _is_file(beside) else find(base, seen)
        except ConfigError as error:
            finding = error.findings[0]
            shown = base if len(base) <= 200 else f"{base[:100]}…"
            raise ConfigError([Finding(where, "extends", f"{shown!r}: {finding.what}", finding.hint)]) from error
    merged: dict[str, Any] = {}
    merged_origins: Origins = {}
    for tree, origins in reversed(chain):
        merged = _merge(merged, tree, (), merged_origins, origins)
    return merged, merged_origins


def _merge(base: Any, top: Any, path: KeyPath, base_origins: Origins, top_origins: Origins) -> Any:
    """Mappings are merged key by key, everything else is replaced; ``base_origins`` is brought up to date.

    A null in place of a mapping takes it out, so that it is what it is by default.
    """
    if isinstance(base, dict) and isinstance(top, dict):
        base_origins[path] = top_origins[path]
        result = dict(base)
        for key, value in top.items():
            merged = _merge(base.get(key), value, (*path, key), base_origins, top_origins)
            if merged is None and isinstance(base.get(key), dict):
                del result[key]
            else:
                result[key] = merged
        return result
    for stale in [p for p in base_origins if p[: len(path)] == path]:
        del base_origins[stale]
    base_origins.update({p: where for p, where in top_origins.items() if p[: len(path)] == path})
    return top


def _is_file(path: Path) -> bool:
    """Whether it is a file (a name that no filesystem takes is none)."""
    try:
        return path.is_file()
    except OSError:
        return False
