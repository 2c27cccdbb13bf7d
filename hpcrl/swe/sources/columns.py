"""Columns of rows: checked where they come in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from hpcrl.errors import UsageError
from hpcrl.reporting.screen_text import visible_line
from hpcrl.storage.msgspec_types import decode_json

_SHOWN = 80


class RowError(UsageError):
    """A row cannot be used."""


def shown_value(value: Any) -> str:
    """Show a value of a row in one short line."""
    return visible_line(value if isinstance(value, str) else repr(value), _SHOWN)


def text_column(row: Mapping[str, Any], name: str, *, required: bool = True) -> str:
    """Return the text of a column (RowError where there is none)."""
    value = row.get(name)
    if value is None or value == "":
        if required:
            there = ", ".join(sorted(row)[:12])
            raise RowError(f"the column {name!r} is missing or empty; there are {there}")
        return ""
    if not isinstance(value, str):
        raise RowError(f"the column {name!r} is not text: {shown_value(value)}")
    return value


def json_column(row: Mapping[str, Any], name: str) -> Any:
    """Return the value of a column, which may be JSON in a text (RowError where it cannot be read)."""
    value = row.get(name)
    if isinstance(value, str):
        try:
            return decode_json(value)
        except msgspec.DecodeError:
            raise RowError(f"the column {name!r} is text, but not JSON: {shown_value(value)}") from None
    return value


def list_column(row: Mapping[str, Any], name: str, *, required: bool = True) -> tuple[str, ...]:
    """Return the texts of a column: a list, or a list as JSON in a text (RowError where it is none)."""
    if row.get(name) in (None, ""):
        if required:
            raise RowError(f"the column {name!r} is missing or empty")
        return ()
    value = json_column(row, name)
    if not isinstance(value, list | tuple) or not all(isinstance(each, str) and each for each in value):
        raise RowError(f"the column {name!r} is not a list of texts: {shown_value(value)}")
    return tuple(dict.fromkeys(value))
