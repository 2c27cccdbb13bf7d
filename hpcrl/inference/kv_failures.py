"""Kinds of failures of calls to the KV pool, as they are counted."""

from __future__ import annotations

from enum import StrEnum


class PoolFailure(StrEnum):
    """Kind of failure of a call to the pool."""

    TIMEOUT = "timeout"
    """A call to get blocks was not answered in time."""
    BEHIND = "behind"
    """A call to get blocks had not begun in time, because earlier ones took long. Many follow one ``timeout``."""
    MASTER = "master"
    """The master of the pool cannot be reached, or answers with an error."""
    SEGMENT = "segment"
    """A block is in the pool, but the memory that has it cannot be reached: its engine has died, and the master has not
    noticed yet. Also where blocks should go there."""
    FULL = "full"
    """There was no room for blocks: the pool drops old ones when it is nearly full, and was not done."""
    DAMAGED = "damaged"
    """The received bytes differ from those that were put."""
