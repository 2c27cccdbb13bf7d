"""Memory that takes the bytes of one segment: of this process alone, or a new file of the node's cache.

A source that reads into given memory asks for `room`. A source that has the bytes already calls `put`: to write them to
a file of a memory filesystem costs half of what the page faults of a new mapping cost. `OwnMemory.keep` takes them over
without a copy.
"""

from __future__ import annotations

import mmap
import os
from abc import ABC, abstractmethod


class SegmentMemory(ABC):
    """Memory for a segment.

    Attributes
    ----------
    size:
        Bytes of the segment.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._room: memoryview | None = None

    def room(self) -> memoryview:
        """Return the memory itself, ``size`` bytes, with what was put there (OSError if there is no space)."""
        if self._room is None:
            self._room = self._allocate()
        return self._room

    @abstractmethod
    def _allocate(self) -> memoryview: ...

    @abstractmethod
    def put(self, data: memoryview) -> None:
        """Copy ``data``, which is the whole segment, ``size`` bytes (OSError if there is no space)."""


class OwnMemory(SegmentMemory):
    """Memory of this process alone."""

    def _allocate(self) -> memoryview:
        return memoryview(bytearray(self.size))

    def put(self, data: memoryview) -> None:
        self.room()[:] = data

    def keep(self, data: memoryview) -> None:
        """Take over the memory of ``data``, the whole segment, without a copy; the caller must not change it."""
        self._room = data


class FileMemory(SegmentMemory):
    """File of a memory filesystem, which others may map."""

    def __init__(self, fd: int, size: int) -> None:
        """Use the open file ``fd``, which the caller closes after the last call of `room` and `put`."""
        super().__init__(size)
        self._fd = fd

    def _allocate(self) -> memoryview:
        length = max(1, self.size)
        os.posix_fallocate(self._fd, 0, length)  # a full memory filesystem is an error here, and no SIGBUS later
        return memoryview(mmap.mmap(self._fd, length))[: self.size]

    def put(self, data: memoryview) -> None:
        done = 0
        while done < self.size:
            done += os.pwrite(self._fd, data[done:], done)
