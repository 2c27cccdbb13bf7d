"""Cases of the planner's benches, which are data: ``bench/planning/cases``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

Row = TypeVar("Row")


def read_cases(name: str) -> dict[str, Any]:
    """Return the content of a file of cases, by section."""
    path = Path(__file__).with_name("cases") / f"{name}.yaml"
    value: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return value


def rows_of(values: list[dict[str, Any]], row: type[Row]) -> list[Row]:
    """Return rows of a section; msgspec.ValidationError where one has an unknown key, or none of a name it needs."""
    return [msgspec.convert(value, row) for value in values]
