"""Where the training loop has its batches from: the dock, or the conversations of a supervised run."""

from __future__ import annotations

from typing import Protocol

from hpcrl.dock.wire import BatchShard

__all__ = ["Batches", "OtherSide"]


class Batches(Protocol):
    """The batches of one rank."""

    def take(self, step: int) -> BatchShard:
        """Return the shard of ``step``."""
        ...

    def close(self) -> None:
        """Ask for nothing more."""
        ...


class OtherSide(Protocol):
    """What the loop tells and asks whoever makes its batches; see `hpcrl.dock.client.DockClient`."""

    def published(self, version: int) -> None: ...
    def snapshot(self, step: int) -> bytes: ...
    def finish(self, version: int) -> None: ...
    def close(self) -> None: ...
