"""Memory that segments are pulled into over the fabric.

Over TCP only the memory of the peer has to be registered. Buffers here are not: other processes cannot write into them,
so that what was compared is what is used. Their memory is lent to who reads the segment, without a copy, and comes back
when that reader drops it: new memory for each segment would cost more than to receive the bytes. Over RDMA buffers are
registered, others can write into them, and data has to be copied out before it is compared.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections import deque

from hpcrl.mooncake import PendingTransferError, TransferEngine
from hpcrl.weights.format.fabric_record import PAGE_BYTES

_abandoned: list[PullBuffer] = []
"""Memory that a transfer may still write to, of readers that are closed: it stays to the end of the process."""


class PullBuffer:
    """Memory of this process for one pull: a page for a header, and room for a segment.

    Attributes
    ----------
    size:
        Maximum bytes of a segment.
    protocol:
        ``tcp`` or ``rdma``.
    address:
        Address of the header; the segment is a page behind.
    memory:
        Header and segment.
    registered:
        Transfer engines that have it registered.
    """

    def __init__(self, size: int, protocol: str) -> None:
        self.size, self.protocol = size, protocol
        # registered memory is shared: a fork must not move the pages that an adapter writes to
        kind = mmap.MAP_PRIVATE if self.is_private else mmap.MAP_SHARED
        self.memory = mmap.mmap(-1, PAGE_BYTES + size, flags=kind | mmap.MAP_ANONYMOUS)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.registered: set[TransferEngine] = set()

    @property
    def is_private(self) -> bool:
        """Return whether no other process can write into it."""
        return self.protocol == "tcp"

    def register(self, engine: TransferEngine) -> None:
        """Register it where the protocol needs that (OSError if that is refused)."""
        if self.is_private or engine in self.registered:
            return
        for old in [each for each in self.registered if each.forgotten]:
            # an engine ends with its last registration; each failure would leave one with its threads otherwise
            old.unregister(self.address)
            self.registered.remove(old)
        engine.register(self.address, PAGE_BYTES + self.size)
        self.registered.add(engine)

    def drop(self) -> None:
        """End all registrations, before the memory is freed: the engine refuses other memory at that address."""
        for engine in self.registered:
            engine.unregister(self.address)
        self.registered.clear()

    def data(self, size: int) -> memoryview:
        return memoryview(self.memory)[PAGE_BYTES : PAGE_BYTES + size]


class PullBuffers:
    """Buffers of one reader. Methods may be called from any thread."""

    def __init__(self, *, streams: int, segment_bytes: int) -> None:
        """Prepare; nothing is allocated yet.

        Parameters
        ----------
        streams:
            Maximum buffers in use by pulls, and maximum buffers that are kept for the next ones.
        segment_bytes:
            Usual size of a segment.
        """
        self._streams, self._segment_bytes = streams, segment_bytes
        #: notified where a pull ends, or is given up
        self._changed = threading.Condition(threading.Lock())
        self._free: deque[PullBuffer] = deque()
        self._in_use = 0
        self._hanging: list[tuple[PullBuffer, PendingTransferError]] = []
        #: of pulls that have taken too long, and have not ended
        self._overdue: set[PullBuffer] = set()
        self._closed = False

    @property
    def in_use(self) -> int:
        """Return the number of buffers that belong to pulls, also to those that have taken too long."""
        return self._in_use

    def take(self, size: int, protocol: str, *, timeout_s: float = 0.0) -> PullBuffer | None:
        """Return a buffer of at least ``size`` bytes, once there is one (OSError without memory).

        None: there is none within ``timeout_s``, all belong to pulls that have taken too long, or `close` was called.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._in_use < self._streams or not self._has_live_pull(), timeout_s)
            over = [each for each in self._hanging if not each[1].is_pending()]
            self._hanging = [each for each in self._hanging if each not in over]
            self._in_use -= len(over)
            for buffer, _ in over:
                self._keep(buffer)
            if self._closed or self._in_use >= self._streams:
                return None
            try:
                buffer = self._free.pop()
            except IndexError:
                buffer = PullBuffer(max(size, self._segment_bytes), protocol)
            if buffer.size < size or buffer.protocol != protocol:
                buffer.drop()
                buffer = PullBuffer(max(size, self._segment_bytes), protocol)
            self._in_use += 1
            return buffer

    def _has_live_pull(self) -> bool:
        return not self._closed and self._in_use > len(self._hanging) + len(self._overdue)

    def give_up(self, buffer: PullBuffer) -> None:
        """Wait no longer for the pull that uses ``buffer``; its own thread gives it back."""
        with self._changed:
            self._overdue.add(buffer)
            self._changed.notify_all()

    def give_back(self, buffer: PullBuffer, after: BaseException | None = None) -> None:
        """Take a buffer back from a pull that ended with the exception ``after``, or without one."""
        with self._changed:
            self._overdue.discard(buffer)
            self._changed.notify_all()
            if not isinstance(after, PendingTransferError):
                self._in_use -= 1
                self._keep(buffer)
            elif self._closed:
                _abandoned.append(buffer)
            else:
                self._hanging.append((buffer, after))

    def lend(self, buffer: PullBuffer, size: int) -> memoryview:
        """Return the segment of ``size`` bytes in a private ``buffer``, which comes back with the last view of it."""
        lent = (ctypes.c_ubyte * size).from_buffer(buffer.memory, PAGE_BYTES)
        # called without the lock: the last view may end in any thread, also in one that has it
        weakref.finalize(lent, self._keep, buffer).atexit = False
        with self._changed:
            self._in_use -= 1
            self._changed.notify_all()
        return memoryview(lent).cast("B")

    def _keep(self, buffer: PullBuffer) -> None:
        if self._closed or len(self._free) >= self._streams:
            buffer.drop()
        else:
            self._free.append(buffer)

    def close(self) -> None:
        """Free what is not in use; the rest follows when its pull ends, or the last view of it."""
        with self._changed:
            self._closed = True
            _abandoned.extend(buffer for buffer, _ in self._hanging)
            self._hanging = []
            while self._free:
                self._free.pop().drop()
            self._changed.notify_all()
