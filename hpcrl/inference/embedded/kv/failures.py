"""What can be wrong with a call to the pool of KV: the kinds that are counted."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["PoolFailure"]


class PoolFailure(StrEnum):
    """What was wrong with a call to the pool."""

    TIMEOUT = "timeout"
    """A call to get blocks was not answered in time."""
    BEHIND = "behind"
    """A call to get blocks had not begun in time: the ones before it took so long. Many follow one ``timeout``."""
    MASTER = "master"
    """The master of the pool cannot be reached, or answers with an error."""
    SEGMENT = "segment"
    """A block is in the pool, but the memory that has it cannot be reached: its engine has died, and the master has not
    noticed yet. Also where blocks should go there."""
    FULL = "full"
    """There was no room for blocks: the pool drops old ones when it is nearly full, and was not done."""
    DAMAGED = "damaged"
    """What came is not what was put."""
