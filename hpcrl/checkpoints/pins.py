"""Pins of checkpoints (`hpcrl.storage.pins`): ``checkpoints/step-000010.pin.json``.

They lie in the directory of the entries, so that a process that has just renamed a file there sees them also through a
stale NFS cache.
"""

from __future__ import annotations

import time
from pathlib import Path

from hpcrl.checkpoints.ledger import CheckpointLedger
from hpcrl.errors import CheckpointError
from hpcrl.storage.pins import Pin, Pins

_LOOKS = 5
_LOOK_S = 0.2


def pins_of(root: Path) -> Pins:
    """Return the pins of a ledger."""
    return Pins(root, "step-", ".pin.json")


def pin(ledger: CheckpointLedger, step: int, *, reason: str, by: str) -> Pin:
    """Keep the entry of ``step`` until it is unpinned.

    Raises
    ------
    CheckpointError
        The entry does not exist, or it was removed at the same moment.
    """
    ledger.open(step)
    pins = pins_of(ledger.root)
    made = pins.add(step, reason=reason, by=by)
    # a process that removes the entry looks for a pin after hiding it, and restores the entry: wait for that
    for look in range(_LOOKS):
        if step in ledger.steps():
            return made
        if look < _LOOKS - 1:
            time.sleep(_LOOK_S)
    pins.remove(step)
    raise CheckpointError(f"{ledger.path_of(step)} was removed while it was being pinned")
