"""What a warehouse does, whatever it is made of."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from hpcrl.dock.ledger.entries import PayloadPlace

__all__ = ["Figures", "Location", "Pool", "Warehouse", "half_at_most", "key_of"]

_log = logging.getLogger(__name__)


class Pool(msgspec.Struct, frozen=True):
    """A pool of memory that is Mooncake's.

    Attributes
    ----------
    host, port:
        Of its master.
    protocol:
        Between nodes: ``tcp`` or ``rdma``.
    """

    host: str
    port: int
    protocol: str

    @property
    def master(self) -> str:
        """As Mooncake's clients are told."""
        return f"{self.host}:{self.port}"


class Location(msgspec.Struct, frozen=True):
    """How those who read find a warehouse.

    Attributes
    ----------
    directory:
        Of its files, on its own node. Its name is not known to others, and occurs on no other node.
    host, port:
        Of the server for other nodes; port 0 where none serves.
    pool:
        Where blocks are objects in Mooncake Store, and there is neither directory nor server.
    """

    directory: str
    host: str = ""
    port: int = 0
    pool: Pool | None = None


class Figures(NamedTuple):
    """What a warehouse holds.

    Attributes
    ----------
    blocks:
        Blocks that may be read.
    held_bytes:
        Memory that they take, and that is kept for those to come.
    limit_bytes:
        What they may take.
    refused:
        Blocks for which there was no room so far.
    """

    blocks: int
    held_bytes: int
    limit_bytes: int
    refused: int


class Warehouse(Protocol):
    """The writer's side. Methods may be called from any thread."""

    @property
    def full(self) -> bool:
        """Whether the last block found no room, and nothing was released since."""

    def put(self, place: PayloadPlace, pieces: Sequence[bytes | memoryview]) -> bool:
        """Keep a block, given in pieces; False where there is no room for it. Never raises for want of room."""

    def release(self, places: Iterable[PayloadPlace]) -> None:
        """Nobody reads these any more, here or elsewhere; unknown ones are passed over."""

    def figures(self) -> Figures:
        """What is held now."""

    def close(self) -> None:
        """Give everything back."""


def key_of(place: PayloadPlace) -> str:
    """The name of a block, of which no other one of the run has the same."""
    return f"{place.file}.{place.offset}"


def half_at_most(limit_bytes: int, free_bytes: int, where: str) -> int:
    """The limit in bytes, or half of what is free where that is less, which is logged: a full node fails others, too.

    ``where`` names the place in the log.
    """
    half = free_bytes // 2
    if half < limit_bytes:
        said = "the warehouse of rollouts takes %.2f GiB at most, half of what is free in %s, not %.2f"
        _log.warning(said, half / (1 << 30), where, limit_bytes / (1 << 30))
    return min(limit_bytes, half)
