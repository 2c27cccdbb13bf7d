"""Registered memory in which a rank of the trainer serves its part of the newest versions over the fabric.

The memory is allocated and registered once, and used in turn: each slot has a header and the data of one version. Over
TCP the transfer engine is given a second, read-only mapping of the same pages, so that a client, which Mooncake does
not authenticate, cannot change what is served. RDMA adapters cannot register read-only mappings: there others can
write. So data is copied into a slot, and the copy that was hashed and written to the share is another one: what was
changed here contradicts the manifest.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from hpcrl.mooncake import TransferEngine
from hpcrl.weights.format.fabric_record import HEADER_BYTES, PAGE_BYTES, FabricPeer

Bytes = NDArray[np.uint8]


class FabricRing:
    """Slots of registered memory of this process. Not thread-safe.

    Attributes
    ----------
    slot_bytes:
        Maximum data of one version.
    """

    def __init__(self, engine: TransferEngine, *, slots: int, slot_bytes: int, read_only: bool) -> None:
        """Allocate and register memory.

        Parameters
        ----------
        engine:
            Serves it.
        slots:
            Versions that are served at one time.
        slot_bytes:
            Maximum data of one version in this process.
        read_only:
            Register a read-only mapping: for TCP.

        Raises
        ------
        OSError
            The memory cannot be had, or cannot be registered.
        """
        self.slot_bytes, self._engine = slot_bytes, engine
        self._stride = PAGE_BYTES + -(-slot_bytes // PAGE_BYTES) * PAGE_BYTES
        size = slots * self._stride
        fd = os.memfd_create("hpcrl-fabric", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, size)  # memory that is missing is an error here, and no SIGBUS later
            self._memory: Bytes = np.frombuffer(mmap.mmap(fd, size), np.uint8)
            access = mmap.PROT_READ if read_only else mmap.PROT_READ | mmap.PROT_WRITE
            self._served: Bytes = np.frombuffer(mmap.mmap(fd, size, prot=access), np.uint8)
        finally:
            os.close(fd)
        self._address = self._served.ctypes.data
        self._slots, self._uses = slots, 0
        engine.register(self._address, size)

    @property
    def nbytes(self) -> int:
        """Return the bytes of registered memory."""
        return self._memory.nbytes

    def fill(self, parts: Sequence[memoryview], seal: Callable[[int, int], bytes]) -> FabricPeer:
        """Serve ``parts``, one behind the other, in place of the oldest version.

        Parameters
        ----------
        parts:
            Data of a version.
        seal:
            Makes the header from the number of this use and the length of the data.

        Raises
        ------
        OSError
            The data is larger than a slot.
        """
        size = sum(part.nbytes for part in parts)
        if size > self.slot_bytes:
            raise OSError(f"{size:,} bytes do not fit into a slot of {self.slot_bytes:,}")
        begin = self._uses % self._slots * self._stride
        self._uses += 1
        # first the header goes: what is read from now on belongs to no version
        self._memory[begin : begin + HEADER_BYTES] = 0
        position = begin + PAGE_BYTES
        for part in parts:
            self._memory[position : position + part.nbytes] = np.frombuffer(part, np.uint8)
            position += part.nbytes
        header = np.frombuffer(seal(self._uses, size), np.uint8)
        self._memory[begin : begin + HEADER_BYTES] = header
        return FabricPeer(self._engine.endpoint, self._address + begin, size, self._uses)

    def close(self) -> None:
        """Serve nothing more."""
        self._memory[:: self._stride] = 0  # the first byte of each header
        self._engine.unregister(self._address)
