"""Pins of checkpoints (`hpcrl.pins`): ``checkpoints/step-000010.pin.json``.

They lie beside the entries, so that whoever has just renamed something there sees them also through a stale NFS cache.
"""

from __future__ import annotations

import time
from pathlib import Path

from hpcrl.checkpoints.ledger import CheckpointLedger
from hpcrl.errors import CheckpointError
from hpcrl.pins import Pin, Pins

__all__ = ["pin", "pins_of"]

_LOOKS = 5
_LOOK_S = 0.2


def pins_of(root: Path) -> Pins:
    """The pins of a ledger."""
    return Pins(root, "step-", ".pin.json")


def pin(ledger: CheckpointLedger, step: int, *, reason: str, by: str) -> Pin:
    """Keep the entry of ``step`` until it is unpinned.

    Raises
    ------
    CheckpointError
        There is no such entry, or it was removed at the same moment.
    """
    ledger.open(step)
    pins = pins_of(ledger.root)
    made = pins.add(step, reason=reason, by=by)
    # whoever removes it looks for a pin once more after hiding it, and then brings it back: wait for that
    for look in range(_LOOKS):
        if step in ledger.steps():
            return made
        if look < _LOOKS - 1:
            time.sleep(_LOOK_S)
    pins.remove(step)
    raise CheckpointError(f"{ledger.path_of(step)} was removed while it was being pinned")
