"""The reader's side: a block from the memory of its own node, from another node's, or from the shared filesystem.

Each block is compared with the length and the hash that the ledger has of it, wherever it came from. What is damaged or
missing in memory is read from the file that made the rollout durable; only where that is gone, too, it is an error.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from hpcrl.dock.ledger.entries import PayloadPlace
from hpcrl.dock.ledger.payload import check_block, read_payload, view_payload
from hpcrl.dock.warehouse.frames import HEAD, LONGEST, Answer, Request, frame
from hpcrl.dock.warehouse.interface import Location, key_of
from hpcrl.dock.warehouse.mooncake import fetch
from hpcrl.ours import check_private, open_ours

__all__ = ["BlockReader"]

_CONNECT_S = 5.0
_RECEIVE_S = 60.0
_SMALL_BYTES = 1 << 18
"""To copy so little takes less than to map it."""


class BlockReader:
    """Reads blocks of one warehouse; for one thread.

    Attributes
    ----------
    sources:
        Blocks that came from the memory of this ``node``, from the ``server`` of another, from a ``pool``, and from
        ``disk``.
    problems:
        Why blocks did not come from memory.
    """

    def __init__(self, location: Location | None, payload_dir: Path, *, authorization: str = "") -> None:
        """Remember where to look; nothing is read.

        Parameters
        ----------
        location:
            Of the warehouse; None where there is none.
        payload_dir:
            Of the run, on the shared filesystem.
        authorization:
            As the HTTP header of this name, for the server.
        """
        self._location, self._payload_dir, self._authorization = location, payload_dir, authorization
        self.sources: Counter[str] = Counter()
        self.problems: list[str] = []
        self._socket: socket.socket | None = None
        self._pool = location.pool if location is not None else None
        self._fetched: dict[str, memoryview | OSError] = {}
        self._here = location is not None and self._pool is None and _is_here(Path(location.directory))
        self._served = location is not None and location.port > 0 and not self._here

    def prepare(self, places: Sequence[PayloadPlace]) -> None:
        """Say which blocks are read next: a pool gives them together in less time than one after the other."""
        if self._pool is None or not places:
            return
        try:
            blocks: Sequence[memoryview | OSError] = fetch(self._pool, places)
        except OSError as error:
            # the others of this batch do not wait for it again
            self._pool = None
            blocks = [error] * len(places)
        self._fetched |= {key_of(place): block for place, block in zip(places, blocks, strict=True)}

    def read(self, place: PayloadPlace) -> memoryview:
        """The block at ``place``, read-only; what is mapped stays as long as the view.

        Raises
        ------
        OSError, ValueError
            It is not in memory, and the file is gone or damaged.
        """
        try:
            if self._here and place.bytes < _SMALL_BYTES:
                return self._counted("node", self._copy(place), place)
            if self._here:
                # all pages at once: finding them one after the other takes longer than reading them
                return self._counted("node", self._map(place, mmap.MAP_SHARED | mmap.MAP_POPULATE), place)
            if self._served:
                return self._counted("server", self._ask(place), place)
            if key_of(place) not in self._fetched:
                self.prepare([place])
            if (fetched := self._fetched.pop(key_of(place), None)) is not None:
                if isinstance(fetched, OSError):
                    raise fetched
                return self._counted("pool", fetched, place)
        except (OSError, ValueError) as error:
            self.problems.append(f"{key_of(place)}: {error}")
        block = memoryview(read_payload(self._payload_dir, place))
        self.sources["disk"] += 1
        return block

    def glance(self, place: PayloadPlace) -> memoryview:
        """The same without a look at its hash, for what is only shown to people: pages come as they are looked at."""
        if self._here:
            with contextlib.suppress(OSError, ValueError):
                return self._map(place, mmap.MAP_SHARED)
        return view_payload(self._payload_dir, place)

    def _counted(self, source: str, block: memoryview, place: PayloadPlace) -> memoryview:
        check_block(block, place)
        self.sources[source] += 1
        return block

    def _map(self, place: PayloadPlace, flags: int) -> memoryview:
        fd = self._open(place)
        try:
            return memoryview(mmap.mmap(fd, place.bytes, flags=flags, prot=mmap.PROT_READ))
        finally:
            os.close(fd)

    def _copy(self, place: PayloadPlace) -> memoryview:
        fd = self._open(place)
        try:
            return memoryview(os.pread(fd, place.bytes, 0))
        finally:
            os.close(fd)

    def _open(self, place: PayloadPlace) -> int:
        assert self._location is not None
        fd = open_ours(f"{self._location.directory}/{key_of(place)}")
        if (size := os.fstat(fd).st_size) < place.bytes:
            os.close(fd)
            raise ValueError(f"it ends {place.bytes - size} bytes before the end of a rollout")
        return fd

    def _ask(self, place: PayloadPlace) -> memoryview:
        try:
            return self._asked(place)
        except (OSError, ValueError):
            self.close()
            raise

    def _asked(self, place: PayloadPlace) -> memoryview:
        assert self._location is not None
        if self._socket is None:
            try:
                self._socket = socket.create_connection((self._location.host, self._location.port), _CONNECT_S)
            except OSError:
                # the others of this batch do not wait for it again
                self._served = False
                raise
            self._socket.settimeout(_RECEIVE_S)
        self._socket.sendall(frame(Request(self._authorization, key_of(place), 0, place.bytes)))
        (length,) = HEAD.unpack(self._receive(HEAD.size))
        if length > LONGEST:
            raise ValueError(f"the server of a warehouse sent {length} bytes as an answer")
        answer = msgspec.msgpack.decode(self._receive(length), type=Answer)
        if answer.status != 200:
            raise ValueError(f"the server of the warehouse answered {answer.status}: {answer.message}")
        return self._receive(place.bytes).toreadonly()

    def _receive(self, count: int) -> memoryview:
        assert self._socket is not None
        data = bytearray(count)
        view = memoryview(data)
        while view:
            got = self._socket.recv_into(view)
            if got == 0:
                raise ConnectionResetError("the server of the warehouse closed the connection")
            view = view[got:]
        return memoryview(data)

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
