"""Blocks in files of a node's shared memory, as those who read them have them."""

from __future__ import annotations

import mmap
import os

_SMALL_BYTES = 1 << 18
"""To copy so little takes less than to map it."""


def view_block(fd: int, size: int) -> memoryview:
    """Return a read-only block of ``size`` bytes: a copy where it is small, else mapped for the lifetime of the view.

    Raises
    ------
    ValueError
        The file is shorter.
    """
    if size >= _SMALL_BYTES:
        # all pages at once: separate page faults take longer than the read
        return map_block(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    _check_length(fd, size)
    return memoryview(os.pread(fd, size, 0))


def map_block(fd: int, size: int, *, flags: int = mmap.MAP_SHARED) -> memoryview:
    """Return a block mapped, read-only (ValueError as `view_block`)."""
    _check_length(fd, size)
    return memoryview(mmap.mmap(fd, size, flags=flags, prot=mmap.PROT_READ))


def _check_length(fd: int, size: int) -> None:
    if (found := os.fstat(fd).st_size) < size:
        raise ValueError(f"it ends {size - found} bytes before the end of a rollout")
