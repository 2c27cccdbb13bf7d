"""Plain data that keeps its JSON: what many renderings of a chat template write with ``tojson`` is made once."""

from __future__ import annotations

from typing import Any


class _KeptDict(dict[str, Any]):
    """A dictionary with its JSON; the sandbox of templates lets none of them change it."""

    __slots__ = ("_json",)
    _json: dict[Any, str]


class _KeptList(list[Any]):
    __slots__ = ("_json",)
    _json: dict[Any, str]


def with_kept_json(value: Any) -> Any:
    """Return a copy of plain data whose dictionaries and lists keep their JSON; it must not be changed."""
    if isinstance(value, dict):
        made = _KeptDict((key, with_kept_json(item)) for key, item in value.items())
        made._json = {}
        return made
    if isinstance(value, tuple):
        return tuple(map(with_kept_json, value))
    if isinstance(value, list):
        items = _KeptList(map(with_kept_json, value))
        items._json = {}
        return items
    return value


def kept_json(value: Any) -> dict[Any, str] | None:
    """Return where the JSON of a value is kept, by the way in which it is written; None for one that keeps none."""
    if isinstance(value, (_KeptDict, _KeptList)):
        return value._json
    return None
