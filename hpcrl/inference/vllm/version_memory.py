"""Host memory of a worker for the tensors of a version: pinned, and kept for the version after it.

A copy from pageable memory to a GPU goes through a small buffer of the driver, and is several times slower than one
from pinned memory. Pinning is slow itself, so it is done once, by the thread that reads, while the engine generates.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from hpcrl.modeling.host_memory import PinnedMemoryError, pinned_bytes

__all__ = ["Lease", "VersionMemory"]

_log = logging.getLogger("vllm.hpcrl")
_SEGMENT_BYTES = 256 << 20
"""Minimum size of what is pinned at once. A larger tensor has a segment of its own."""
_ALIGNMENT = 512
"""Multiple, in bytes, that each tensor begins at."""


class VersionMemory:
    """Memory that one version after another is read into.

    Methods may be called from any thread: a thread that reads a version nobody wants any more may still write to its
    memory when the next version is begun, which therefore gets other memory.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        segment_bytes: int = _SEGMENT_BYTES,
        pin: Callable[[int, torch.device], Tensor] = pinned_bytes,
    ) -> None:
        """Take no memory yet.

        Parameters
        ----------
        device:
            Where the tensors are copied to. For a processor each version has ordinary memory, which is not kept.
        segment_bytes, pin:
            Minimum size of a segment, and what allocates ``[size]`` uint8.
        """
        self._device, self._segment_bytes, self._pin = device, segment_bytes, pin
        self._keeps = device.type != "cpu"
        self._lock = threading.Lock()
        self._free: list[Tensor] = []

    def lend(self) -> Lease:
        """Lend all memory that is free; call it in the thread that will copy tensors to it."""
        if self._device.type == "cuda":
            # a thread begins on GPU 0, where pinning would make a context
            torch.cuda.set_device(self._device)
        with self._lock:
            free, self._free = self._free, []
        return Lease(self, free)

    def give_back(self, lease: Lease) -> None:
        """Let the next version use what `lend` returned, tensors included; all copies from them must be finished."""
        segments = lease.end()
        if not self._keeps:
            return
        with self._lock:
            # two versions were read at the same time where one was given up: the memory of one is enough
            self._free = max(self._free, segments, key=lambda held: sum(segment.nbytes for segment in held))

    def allocate(self, size: int) -> Tensor:
        """Return a new segment, ``[size or more]`` uint8; of pageable memory where no more can be pinned."""
        size = max(size, self._segment_bytes) if self._keeps else size
        try:
            return self._pin(size, self._device)
        except PinnedMemoryError as error:
            _log.warning("a version is read into pageable memory, from which updates are slower: %s", error)
            return torch.empty(size, dtype=torch.uint8)


class Lease:
    """Memory for one version, until `VersionMemory.give_back`."""

    def __init__(self, memory: VersionMemory, segments: list[Tensor]) -> None:
        """Begin with ``segments``, which are free; ``memory`` allocates more."""
        self._memory, self._segments = memory, segments
        self._used = [0] * len(segments)

    def copy_of(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor of the host, contiguous, in this memory."""
        place = self._room(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        return place.copy_(tensor)

    def end(self) -> list[Tensor]:
        """Return the segments and hold none."""
        segments, self._segments, self._used = self._segments, [], []
        return segments

    def _room(self, size: int) -> Tensor:
        taken = -(-size // _ALIGNMENT) * _ALIGNMENT
        for at, segment in enumerate(self._segments):
            start = self._used[at]
            if start + taken <= segment.nbytes:
                break
        else:
            at, start = len(self._segments), 0
            self._segments.append(self._memory.allocate(taken))
            self._used.append(0)
        self._used[at] = start + taken
        return self._segments[at][start : start + size]
