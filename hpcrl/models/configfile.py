"""Reading the bytes of a ``config.json``: the same for trainer, engines and planner."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_MOST_BYTES = 16 << 20


def read_config(path: Path) -> Any:
    """Return the contents of a ``config.json``; an object in every valid file.

    Raises
    ------
    ValueError
        It is not JSON, has a key twice, or is too large or too deep for any config. The message has no path.
    OSError
        The filesystem refused.
    """
    size = path.stat().st_size
    if size > _MOST_BYTES:
        raise ValueError(f"has {size:,} bytes; a config has some kilobytes, {_MOST_BYTES:,} bytes at most")
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=_no_key_twice)
    except RecursionError:
        raise ValueError("its lists and objects are nested too deeply") from None


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; a key that occurs twice is refused because it is ambiguous."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [key for key, _ in pairs]
        raise ValueError(f"{next(key for key in names if names.count(key) > 1)} appears twice")
    return found
