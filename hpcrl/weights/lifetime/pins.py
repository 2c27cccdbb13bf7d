"""Pins of policy versions (`hpcrl.storage.pins`): ``weights/.pins/v000012.json``."""

from __future__ import annotations

from pathlib import Path

from hpcrl.errors import HandoffError
from hpcrl.storage.pins import Pin, Pins


def handoff_pins(root: Path) -> Pins:
    """Return the pins of a store."""
    return Pins(root / ".pins", "v", ".json")


def read_pins(root: Path) -> dict[int, Pin]:
    """Return pins by version (HandoffError where they cannot be listed: the pinned versions are unknown then)."""
    pins = handoff_pins(root)
    try:
        return pins.all()
    except OSError as error:
        raise HandoffError(f"{pins.directory} cannot be listed: {error}") from error
