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

from hpcrl.modeling.memory.host_memory import PinnedMemoryError, pinned_bytes

_log = logging.getLogger("vllm.hpcrl")
_SEGMENT_BYTES = 256 << 20
"""Minimum bytes that are pinned at once. A larger tensor has a segment of its own."""
_ALIGNMENT = 512
"""Alignment of each tensor in bytes."""


class VersionMemory:
    """Memory that one version after another is read into.

    Methods may be called from any thread: a thread that reads an abandoned version may still write to its
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
            Device the tensors are copied to. On a CPU each version has ordinary memory, which is not kept.
        segment_bytes, pin:
            Minimum size of a segment, and what allocates ``[size]`` uint8.
        """
        self._device, self._segment_bytes, self._pin = device, segment_bytes, pin
        self._keeps = device.type != "cpu"
        self._lock = threading.Lock()
        self._free: list[Tensor] = []

    def lend(self) -> Lease:
        """Give out all free memory; call it in the thread that will copy tensors to it."""
        if self._device.type == "cuda":
            # a new thread uses GPU 0, where pinning would create a context
            torch.cuda.set_device(self._device)
        with self._lock:
            free, self._free = self._free, []
        return Lease(self, free)

    def give_back(self, lease: Lease) -> None:
        """Give back memory of a lease for the next version, tensors included; all copies from them must be finished."""
        segments = lease.end()
        if not self._keeps:
            return
        with self._lock:
            # after an abandoned read two versions had memory at the same time: keep that of one
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
