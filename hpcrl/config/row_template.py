"""Templates over the columns of a row: ``{column}`` stands for what is in the column, ``{{`` and ``}}`` for braces."""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError


def template_columns(template: str) -> list[str]:
    """Return the columns that a template names, each once (ValueError where it is none)."""
    return list(dict.fromkeys(column for _, column, _ in _parts(template) if column is not None))


def optional_columns(template: str) -> set[str]:
    """Return the columns that may be empty: those that stand in a template as ``{column:optional}`` alone."""
    parts = _parts(template)
    return {column for _, column, form in parts if column and form} - {column for _, column, form in parts if not form}


def fill_template(template: str, values: Mapping[str, str]) -> str:
    """Return the text of a template; values are inserted as they are, braces included (KeyError for a missing one)."""
    return "".join(text + ("" if column is None else values[column]) for text, column, _ in _parts(template))


def _parts(template: str) -> list[tuple[str, str | None, str]]:
    """Split a template into texts, each with the column behind it and that column's format."""
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"is not a template: {error}; a brace of the text is written twice") from None
    for _, column, form, conversion in parts:
        if column == "":
            raise ValueError("is not a template: {} names no column; a brace of the text is written twice")
        if form not in (None, "", "optional") or conversion:
            what = f"{{{column}}} is followed by a format; only {{column}} and {{column:optional}} are known"
            raise ValueError(f"is not a template: {what}")
    return [(text, column, form or "") for text, column, form, _ in parts]


def _is_template(template: str) -> str:
    if not template.strip():
        raise PydanticCustomError("template", "is empty")
    try:
        template_columns(template)
    except ValueError as error:
        raise PydanticCustomError("template", str(error)) from None
    return template


RowTemplate = Annotated[str, AfterValidator(_is_template)]
"""A template whose braces are right."""
