"""The reader's side: a block from the memory of its own node, from another node's, or from the shared filesystem.

Where several ranks of a node train on the same blocks of another one, they fetch each of them once
(`hpcrl.dock.warehouse.sharing`).

Each block is compared with the length and the hash that the ledger has of it, wherever it came from. What is damaged or
missing in memory is read from the file that made the rollout durable; only where that is gone, too, it is an error.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from hpcrl.dock.ledger.entries import PayloadPlace
from hpcrl.dock.ledger.payload import check_block, read_payload, view_payload
from hpcrl.dock.warehouse.frames import HEAD, LONGEST, Answer, Request, frame
from hpcrl.dock.warehouse.interface import Location, key_of
from hpcrl.dock.warehouse.mooncake_payloads import fetch
from hpcrl.dock.warehouse.payload_files import map_block, view_block
from hpcrl.dock.warehouse.sharing import SharedBlocks, Sharing
from hpcrl.storage.msgspec_types import decode_msgpack
from hpcrl.storage.trusted_paths import check_private, open_trusted

_CONNECT_S = 5.0
_RECEIVE_S = 60.0


class BlockReader:
    """Reader of blocks of one warehouse; for one thread.

    Attributes
    ----------
    sources:
        Blocks that came from the memory of this ``node``, from the ``server`` of another, from a ``pool``, and from
        ``disk``. Where ranks share them: those that this one has fetched by where it found them, the others' as
        ``node``.
    problems:
        Reasons why blocks did not come from memory.
    unshared:
        Reasons why this rank has fetched blocks for itself alone that it should have shared.
    """

    def __init__(self, location: Location | None, payload_dir: Path, *, authorization: str = "") -> None:
        """Remember the places of blocks; nothing is read.

        Parameters
        ----------
        location:
            Address of the warehouse; None without one.
        payload_dir:
            Directory of the run's columns, on the shared filesystem.
        authorization:
            As the HTTP header of this name, for the server.
        """
        self._location, self._payload_dir, self._authorization = location, payload_dir, authorization
        self.sources: Counter[str] = Counter()
        self.problems: list[str] = []
        self.unshared: list[str] = []
        self._shared: SharedBlocks | None = None
        self._socket: socket.socket | None = None
        self._pool = location.pool if location is not None else None
        self._fetched: dict[str, memoryview | OSError] = {}
        self._here = location is not None and self._pool is None and _is_here(Path(location.directory))
        self._served = location is not None and location.port > 0 and not self._here

    def share(self, sharing: Sharing, step: int) -> None:
        """Share what comes from another node with the ranks of this one that train on it, too."""
        if self._location is not None and self._pool is None and not self._here:
            self._shared = sharing.of(self._location, self._authorization, step)

    def prepare(self, places: Sequence[PayloadPlace]) -> None:
        """Say which blocks are read next.

        A pool gives them together in less time than one after the other; ranks that share them fetch different ones.

        Raises
        ------
        HpcrlError
            They are in a pool, and its client is not installed or cannot be loaded (also of `read`).
        """
        if self._shared is not None:
            self._shared.fetch(places, self._load)
        if self._pool is None or not places:
            return
        try:
            blocks: Sequence[memoryview | OSError] = fetch(self._pool, places)
        except OSError as error:
            # the other blocks of this batch do not wait for it again
            self._pool = None
            blocks = [error] * len(places)
        self._fetched |= {key_of(place): block for place, block in zip(places, blocks, strict=True)}

    def read(self, place: PayloadPlace) -> memoryview:
        """Return the block at ``place``, read-only; a mapped block stays as long as the view.

        Raises
        ------
        OSError, ValueError
            It is not in memory, and the file was removed or is damaged.
        """
        if self._shared is not None:
            try:
                found = self._shared.read(place, self._load)
            except (OSError, ValueError) as error:
                self.unshared.append(f"{key_of(place)}: {error}")
            else:
                if not found.own:  # otherwise `_load` has counted it
                    self.sources["node"] += 1
                return found.block
        try:
            if (block := self._in_memory(place)) is not None:
                return block
        except (OSError, ValueError) as error:
            self.problems.append(f"{key_of(place)}: {error}")
        block = memoryview(read_payload(self._payload_dir, place))
        self.sources["disk"] += 1
        return block

    def glance(self, place: PayloadPlace) -> memoryview:
        """Return the block at ``place`` without comparing its hash, for display only: pages are read on access."""
        if self._here:
            with contextlib.suppress(OSError, ValueError):
                return self._view(place, map_block)
        return view_payload(self._payload_dir, place)

    def _in_memory(self, place: PayloadPlace) -> memoryview | None:
        """Return the block from a warehouse; None without one (OSError, ValueError where it lacks the block)."""
        if self._here:
            return self._counted("node", self._view(place, view_block), place)
        if self._served:
            try:
                memory = memoryview(bytearray(place.bytes))
            except MemoryError as error:
                raise ValueError(f"there is no memory for a rollout of {place.bytes} bytes") from error
            self._ask(place, memory)
            return self._counted("server", memory.toreadonly(), place)
        if self._pool is not None and key_of(place) not in self._fetched:
            self.prepare([place])
        fetched = self._fetched.pop(key_of(place), None)
        if isinstance(fetched, OSError):
            raise fetched
        return None if fetched is None else self._counted("pool", fetched, place)

    def _load(self, place: PayloadPlace, memory: memoryview) -> None:
        """Fill memory that is shared with a block, compared with its hash: as `read`, for all ranks of this node."""
        try:
            if self._served:
                self._ask(place, memory)
                self._counted("server", memory, place)
                return
        except (OSError, ValueError) as error:
            self.problems.append(f"{key_of(place)}: {error}")
        memory[:] = read_payload(self._payload_dir, place)
        self.sources["disk"] += 1

    def _counted(self, source: str, block: memoryview, place: PayloadPlace) -> memoryview:
        check_block(block, place)
        self.sources[source] += 1
        return block

    def _view(self, place: PayloadPlace, view: Callable[[int, int], memoryview]) -> memoryview:
        assert self._location is not None
        fd = open_trusted(f"{self._location.directory}/{key_of(place)}")
        try:
            return view(fd, place.bytes)
        finally:
            os.close(fd)

    def _ask(self, place: PayloadPlace, memory: memoryview) -> None:
        """Receive a block from the server of its warehouse."""
        try:
            self._receive_block(place, memory)
        except (OSError, ValueError):
            self.close()
            raise

    def _receive_block(self, place: PayloadPlace, memory: memoryview) -> None:
        assert self._location is not None
        if self._socket is None:
            try:
                self._socket = socket.create_connection((self._location.host, self._location.port), _CONNECT_S)
            except OSError:
                # the other blocks of this batch do not wait for it again
                self._served = False
                raise
            self._socket.settimeout(_RECEIVE_S)
        self._socket.sendall(frame(Request(self._authorization, key_of(place), 0, place.bytes)))
        head = bytearray(HEAD.size)
        self._receive(head)
        (length,) = HEAD.unpack(head)
        if length > LONGEST:
            raise ValueError(f"the server of a warehouse sent {length} bytes as an answer")
        data = bytearray(length)
        self._receive(data)
        answer = decode_msgpack(data, Answer)
        if answer.status != 200:
            raise ValueError(f"the server of the warehouse answered {answer.status}: {answer.message}")
        self._receive(memory)

    def _receive(self, memory: bytearray | memoryview) -> None:
        assert self._socket is not None
        # views are released before the error leaves, so that the mapping can be closed
        with memoryview(memory) as whole:
            begin = 0
            while begin < len(whole):
                with whole[begin:] as rest:
                    got = self._socket.recv_into(rest)
                if got == 0:
                    raise ConnectionResetError("the server of the warehouse closed the connection")
                begin += got

    def close(self) -> None:
        """End the connection; what was read stays."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _is_here(directory: Path) -> bool:
    with contextlib.suppress(OSError):
        check_private(directory)
        return True
    return False
