"""Interface of a warehouse of blocks, independent of its implementation."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from hpcrl.dock.ledger.entries import PayloadPlace

_log = logging.getLogger(__name__)


class Pool(msgspec.Struct, frozen=True):
    """Pool of memory in Mooncake Store.

    Attributes
    ----------
    host, port:
        Address of its master.
    protocol:
        Between nodes: ``tcp`` or ``rdma``.
    """

    host: str
    port: int
    protocol: str

    @property
    def master(self) -> str:
        """Return the address in the format of Mooncake's clients."""
        return f"{self.host}:{self.port}"


class Location(msgspec.Struct, frozen=True):
    """Address under which readers find a warehouse.

    Attributes
    ----------
    directory:
        Directory of its files, on its own node. Its name is secret, and occurs on no other node.
    host, port:
        Address of the server for other nodes; port 0 where there is none.
    pool:
        Pool where blocks are objects in Mooncake Store, without a directory and a server.
    """

    directory: str
    host: str = ""
    port: int = 0
    pool: Pool | None = None


class Figures(NamedTuple):
    """Contents of a warehouse in numbers.

    Attributes
    ----------
    blocks:
        Blocks that may be read.
    held_bytes:
        Memory of these blocks and of files that are kept for reuse, in bytes.
    limit_bytes:
        Maximum of ``held_bytes``.
    refused:
        Number of blocks so far for which there was no room.
    """

    blocks: int
    held_bytes: int
    limit_bytes: int
    refused: int


class Warehouse(Protocol):
    """The writer's side. Methods may be called from any thread."""

    @property
    def full(self) -> bool:
        """Return whether the last block did not fit, and no block was released since."""

    def put(self, place: PayloadPlace, pieces: Sequence[bytes | memoryview]) -> bool:
        """Keep a block, given in pieces; return False where it does not fit. A lack of room never raises."""

    def release(self, places: Iterable[PayloadPlace]) -> None:
        """Release blocks that are not read any more, on any node; unknown ones are ignored."""

    def figures(self) -> Figures:
        """Return the current figures."""

    def close(self) -> None:
        """Give everything back."""


def key_of(place: PayloadPlace) -> str:
    """Return the name of a block, unique within the run."""
    return f"{place.file}.{place.offset}"


def half_at_most(limit_bytes: int, free_bytes: int, where: str) -> int:
    """Return the limit in bytes, or half of the free bytes where that is less.

    The smaller limit is logged: a full node also makes other processes fail. ``where`` names the place in the log.
    """
    half = free_bytes // 2
    if half < limit_bytes:
        said = "the warehouse of rollouts takes %.2f GiB at most, half of what is free in %s, not %.2f"
        _log.warning(said, half / (1 << 30), where, limit_bytes / (1 << 30))
    return min(limit_bytes, half)
