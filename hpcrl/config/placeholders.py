"""Placeholders of a draft that a person has to fill in: refused in every field, at any depth."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from hpcrl.config.yamltree import KeyPath, Origins
from hpcrl.errors import Finding

_CHANGE_ME = re.compile(r"(?i)(?<![a-z0-9])(?:change|replace|fill|edit)[\s_-]?(?:me|this)(?:[\s_-]?in)?(?![a-z0-9])")
_OPEN = re.compile(r"(?:^|[/:=,;\s])(?:<[^<>/]*>|TODO|FIXME|TBD|XXX+|\{\{[^{}]*\}\})(?:$|[/:=,;\s])")
"""Only as a whole word of a value: in lower case they may be names of directories."""
_PROSE = ("description",)
"""Fields with sentences for people: a note about work to do is not a placeholder there."""


def find_placeholders(tree: Any, origins: Origins, *, drafted: bool) -> list[Finding]:
    """Return a finding for each value, and each key, that is an unfilled placeholder.

    Parameters
    ----------
    tree:
        A parsed file.
    origins:
        Places of its values.
    drafted:
        The file is a cluster profile, of which hpcrl itself writes drafts: ``TODO`` and ``<your account>`` are refused
        as well. In a recipe, angle brackets may be what an environment looks for.
    """
    return [
        Finding(_where(path, origins), ".".join(map(str, path)), f"is still to be filled in ({text!r})", _hint(path))
        for path, text in _texts(tree, ())
        if _is_open(text, drafted=drafted and path[-1:] != _PROSE)
    ]


def _texts(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    if isinstance(value, dict):
        for key, item in value.items():
            if isinstance(key, str) and not isinstance(item, str):
                yield (*path, key), key
            yield from _texts(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _texts(item, (*path, index))
    elif isinstance(value, str):
        # the key of a value is checked with it: one finding for both
        key = path[-1] if path and isinstance(path[-1], str) else ""
        yield path, value if not _CHANGE_ME.search(key) else key


def _is_open(text: str, *, drafted: bool) -> bool:
    return bool(_CHANGE_ME.search(text) or (drafted and _OPEN.search(text)))


def _hint(path: KeyPath) -> str:
    return "put the value of your site there, or remove the key" if path else "fill it in"


def _where(path: KeyPath, origins: Origins) -> str:
    while path and path not in origins:
        path = path[:-1]
    return origins.get(path, "")
