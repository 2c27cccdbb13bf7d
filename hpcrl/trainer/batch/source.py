"""Sources of the training loop's batches: the dock, or the conversations of a supervised run."""

from __future__ import annotations

from typing import Protocol

from hpcrl.dock.wire import BatchShard
from hpcrl.trainer.parallel.ranks import Ranks


class Batches(Protocol):
    """The batches of one rank."""

    def take(self, step: int) -> BatchShard:
        """Return the shard of ``step``."""
        ...

    def close(self) -> None:
        """Ask for nothing more."""
        ...


class OtherSide(Protocol):
    """Interface to the process that makes the batches of the training loop; see `hpcrl.dock.client.DockClient`."""

    def published(self, version: int) -> None: ...
    def snapshot(self, step: int) -> bytes: ...
    def finish(self, version: int) -> None: ...
    def close(self) -> None: ...


def check_shard(shard: BatchShard, step: int, data: Ranks) -> None:
    """Raise ValueError where a shard is not that of ``step`` for this rank of ``data``."""
    got, wanted = (shard.step, shard.rank, shard.world_size), (step, data.rank, data.size)
    if got != wanted:
        raise ValueError(f"the dock sent (step, rank, world size) {got}, requested was {wanted}")
