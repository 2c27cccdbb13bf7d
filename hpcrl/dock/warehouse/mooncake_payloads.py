"""A warehouse of objects in Mooncake Store: one segment in memory of the process that writes, read over TCP or RDMA.

An object has the name of its block and its bytes. Mooncake compares nothing (0.3.10 truncated objects over TCP and
reported success), so readers compare length and hash. Objects are pinned: none is evicted before it is released. The
master knows where they are; when it dies, all of them are lost, and are read from the durable files.

Calls of the client return negative numbers where they fail, and raise nothing.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from hpcrl.dock.ledger.entries import PayloadPlace
from hpcrl.dock.warehouse.interface import Figures, Location, Pool, half_at_most, key_of
from hpcrl.dock.warehouse.pool_master import PoolMaster, reach
from hpcrl.mooncake import load_client
from hpcrl.network.interfaces import address_towards
from hpcrl.processes.daemon_threads import DaemonExecutor

_log = logging.getLogger(__name__)
_METADATA = "P2PHANDSHAKE"
"""Metadata mode in which clients exchange the addresses of their memory, without a server."""
_BUFFER_BYTES = 16 << 20
"""Bytes of a client's buffer for calls that hpcrl does not use."""
_ALIGN = 64
_SEGMENT_STEP = 16 << 20
_NO_SPACE, _NOT_FOUND = -200, -704
_RPC_TIMEOUT = -901
_AGAIN_S = 5.0
"""A pool that failed is left alone for so long: a call of it may take seconds, and rollouts wait for it."""
_SILENT_S = 120.0
"""The same where a master has hung: each call would wait 30 s, as long as Mooncake waits for an answer."""


class MooncakeWarehouse:
    """The writer's side; see `hpcrl.dock.warehouse.interface.Warehouse`.

    Attributes
    ----------
    location:
        For readers.
    master:
        Runs until this is closed.
    """

    def __init__(self, pool: Pool, *, limit_bytes: int) -> None:
        """Start the master, and give memory of this process to the pool.

        Parameters
        ----------
        limit_bytes:
            Maximum bytes of objects; they take at most half of the memory that is free now.

        Raises
        ------
        HpcrlError
            Mooncake is not installed, cannot be loaded, or its master does not start.
        OSError
            The pool cannot be joined.
        """
        client = load_client()
        self._limit = half_at_most(limit_bytes, psutil.virtual_memory().available, "the node's memory")
        self._pinned = client.ReplicateConfig()
        self._pinned.with_hard_pin = True
        self._pool, self.location = pool, Location("", pool=pool)
        self.master = PoolMaster(pool)
        segment = -(-self._limit // _SEGMENT_STEP) * _SEGMENT_STEP
        try:
            self._store = _join(pool, segment_bytes=segment)
        except OSError:
            self.master.close()
            raise
        self._lock, self._putting = threading.Lock(), threading.Lock()
        # a thread removes objects at the master: event loops call `release`
        self._remover = DaemonExecutor(1, thread_name_prefix="pool-release")
        self._staged = np.empty(0, np.uint8)
        """Registered memory that objects are copied from."""
        self._sizes: dict[str, int] = {}
        self._doomed: list[str] = []
        """Released, and perhaps still in the pool."""
        self._held, self._refused, self._full, self._closed, self._again_s = 0, 0, False, False, 0.0

    @property
    def full(self) -> bool:
        return self._full

    def put(self, place: PayloadPlace, pieces: Sequence[bytes | memoryview]) -> bool:
        """Write an object."""
        key = key_of(place)
        with self._putting:
            with self._lock:
                self._full = self._held + place.bytes > self._limit and not self._closed
                if self._full or self._closed or time.monotonic() < self._again_s:
                    self._refused += 1
                    return False
            self._stage(pieces, place.bytes)
            code = self._store.put_from(key, self._staged.ctypes.data, place.bytes, self._pinned)
            with self._lock:
                if code == 0:
                    self._sizes[key] = place.bytes
                    self._held += place.bytes
                    return True
                self._refused += 1
                # with no objects the failure is not a lack of room: the master is new, and the segment has not
                # registered yet
                self._full = code == _NO_SPACE and self._held > 0
                if code == _RPC_TIMEOUT:
                    self._again_s = time.monotonic() + _SILENT_S
                    _log.warning(
                        "%s; until then ranks read finished rollouts from the shared filesystem", _silent(self._pool)
                    )
                elif not self._full:
                    self._again_s = time.monotonic() + _AGAIN_S
                    _log.warning("the pool of rollouts cannot keep a block of %d bytes: code %d", place.bytes, code)
                return False

    def _stage(self, pieces: Sequence[bytes | memoryview], size: int) -> None:
        if len(self._staged) < size:
            if len(self._staged):
                self._store.unregister_buffer(self._staged.ctypes.data)
            self._staged = np.empty(2 * size, np.uint8)
            self._store.register_buffer(self._staged.ctypes.data, self._staged.nbytes)
        start = 0
        for piece in pieces:
            part = np.frombuffer(piece, np.uint8)
            self._staged[start : start + len(part)] = part
            start += len(part)

    def release(self, places: Iterable[PayloadPlace]) -> None:
        """Remove the objects, soon."""
        with self._lock:
            for place in places:
                size = self._sizes.pop(key_of(place), None)
                if size is not None and not self._closed:
                    self._held -= size
                    self._doomed.append(key_of(place))
                    self._full = False
            if self._doomed and not self._closed:
                self._remover.submit(self._remove)

    def _remove(self) -> None:
        with self._lock:
            doomed, self._doomed = self._doomed, []
        if doomed:
            # also where another process has just read it
            codes = self._store.batch_remove(doomed, True)
            with self._lock:
                self._doomed += [key for key, code in zip(doomed, codes, strict=True) if code not in (0, _NOT_FOUND)]

    def figures(self) -> Figures:
        """Return the current figures."""
        with self._lock:
            return Figures(len(self._sizes), self._held, self._limit, self._refused)

    def close(self) -> None:
        """Leave the pool, and end the master."""
        with self._lock:
            if self._closed:
                return
            self._closed, self._full = True, False
        self._remover.shutdown(cancel_futures=True)
        with self._putting:
            self._store.close()
        self.master.close()


_joined: dict[Pool, Any] = {}
"""A process reads by one client a pool, step after step: to join takes half a second."""
_joining = threading.Lock()
_silent_until_s: dict[Pool, float] = {}


def fetch(pool: Pool, places: Sequence[PayloadPlace]) -> list[memoryview | OSError]:
    """Return blocks of a pool, read in one call; in place of an incomplete block, the reason.

    Their hashes are not compared yet. They share memory, which stays as long as any of them. Mooncake waits 30 s
    for a master or an owner of memory that hangs.

    Raises
    ------
    HpcrlError
        Mooncake is not installed, or cannot be loaded.
    OSError
        The pool cannot be joined, or its master did not answer lately.
    """
    if time.monotonic() < _silent_until_s.get(pool, 0.0):
        raise OSError(_silent(pool))
    with _joining:
        if pool not in _joined:
            if not _joined:
                atexit.register(leave_pools)
            _joined[pool] = _join(pool, segment_bytes=0)
        store = _joined[pool]
    starts, end = [], 0
    for place in places:
        starts.append(end)
        end += -(-place.bytes // _ALIGN) * _ALIGN
    memory: NDArray[np.uint8] = np.empty(max(end, 1), np.uint8)
    address = memory.ctypes.data
    store.register_buffer(address, memory.nbytes)
    try:
        keys, sizes = [key_of(place) for place in places], [place.bytes for place in places]
        codes = store.batch_get_into(keys, [address + start for start in starts], sizes)
    finally:
        store.unregister_buffer(address)
    if _RPC_TIMEOUT in codes:
        _silent_until_s[pool] = time.monotonic() + _SILENT_S
    view = memory.data.toreadonly()
    return [
        view[start : start + place.bytes] if code == place.bytes else OSError(_why(code, place))
        for start, place, code in zip(starts, places, codes, strict=True)
    ]


def _silent(pool: Pool) -> str:
    return f"the master of the pool at {pool.master} did not answer: it is asked again after {_SILENT_S:g} s"


def _why(code: int, place: PayloadPlace) -> str:
    if code == _NOT_FOUND:
        return "the pool does not have it"
    if code < 0:
        return f"the pool answered with code {code}"
    return f"the pool gave {code} of {place.bytes} bytes"


def leave_pools() -> None:
    """Close all clients of this process that read."""
    with _joining:
        while _joined:
            _joined.popitem()[1].close()
    _silent_until_s.clear()


def _join(pool: Pool, *, segment_bytes: int) -> Any:
    store = load_client().MooncakeDistributedStore()
    reach(pool)
    host = address_towards(pool.host)
    code = store.setup(host, _METADATA, segment_bytes, _BUFFER_BYTES, pool.protocol, "", pool.master)
    if code != 0:
        raise OSError(f"{host} cannot join the pool of rollouts at {pool.master} ({pool.protocol}): code {code}")
    return store
