"""Files on top of those that they ``extend``: trees of values and the places where each was written."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from hpcrl.config.earlier import FileKind, read_earlier, take_schema
from hpcrl.config.yamltree import KeyPath, Origins, parse_file
from hpcrl.errors import ConfigError, Finding

_MAX_EXTENDS = 8


def with_bases(
    source: Path, what: FileKind, find: Callable[[str, Collection[Path]], Path]
) -> tuple[dict[str, Any], Origins]:
    """Return the tree of a file merged onto the files that it extends, the nearest last.

    Parameters
    ----------
    what:
        Kind of file.
    find:
        Finds the file of a name, given the (resolved) files that led to the name.

    Raises
    ------
    ConfigError
        A file cannot be read or does not exist, or the files extend each other in a circle.
    """
    chain: list[tuple[dict[str, Any], Origins]] = []
    seen: list[Path] = []
    path = source
    while True:
        if path.resolve() in seen or len(seen) == _MAX_EXTENDS:
            names = " -> ".join(p.name for p in (*seen, path))
            raise ConfigError([Finding(str(source), "extends", f"is circular or nested too deeply: {names}")])
        seen.append(path.resolve())
        tree, origins = parse_file(path)
        stated = take_schema(tree, origins.get(("schema",), str(path)))
        if stated is None and what == "recipe":  # that of a run of an earlier version may be given by its path
            read_earlier(what, tree)
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
    """Merge mappings key by key, replace everything else, and update ``base_origins``.

    A null in place of a mapping removes it, so that it has its default value.
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
    """Return whether it is a file; a name that the filesystem does not accept is not one."""
    try:
        return path.is_file()
    except OSError:
        return False
