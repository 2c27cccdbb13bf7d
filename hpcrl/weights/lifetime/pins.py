"""Pins of policy versions (`hpcrl.pins`): ``weights/.pins/v000012.json``."""

from __future__ import annotations

from pathlib import Path

from hpcrl.errors import HandoffError
from hpcrl.pins import Pin, Pins

__all__ = ["pins_of", "read_pins"]


def pins_of(root: Path) -> Pins:
    """The pins of a store."""
    return Pins(root / ".pins", "v", ".json")


def read_pins(root: Path) -> dict[int, Pin]:
    """Pins by version (HandoffError where they cannot be listed: what is pinned is unknown then)."""
    pins = pins_of(root)
    try:
        return pins.all()
    except OSError as error:
        raise HandoffError(f"{pins.directory} cannot be listed: {error}") from error
