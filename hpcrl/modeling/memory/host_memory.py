"""Pinned memory of the host, of the size that is asked for.

torch's own allocator of pinned memory rounds every size up to a power of two: the moments of a large model take 1.8
times what they need. Its setting ``pinned_max_round_threshold_mb`` ends that, but a freed block is then given to any
request for a size with the same next power of two, even if the block is smaller (torch 2.11 to 2.13,
``ATen/core/CachingHostAllocator.h``: a list of free blocks for each power of two, of which the last one is taken).
So large memory is allocated from the system here, in whole pages, and registered with CUDA.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from typing import Any

import torch
from torch import Tensor

from hpcrl.errors import HpcrlError
from hpcrl.modeling.blocks import is_sharded, local_part
from hpcrl.models.rooms import room_bytes

_LEAST = 1 << 20
"""Minimum size in bytes; smaller ones are left to torch's allocator, where rounding costs little."""
_PORTABLE = 1
"""``cudaHostRegisterPortable``: pinned for every device."""


class PinnedMemoryError(HpcrlError):
    """CUDA refuses to pin memory of the host."""


def pinned_bytes(size: int, device: torch.device) -> Tensor:
    """Return ``[size]`` uint8 of host memory that ``device`` can read and write without help of the CPU.

    Not initialised. It is ordinary memory where ``device`` is a processor, and goes back to the system with its last
    view; copies that are still to be made from or to it must be finished by then.

    Raises
    ------
    PinnedMemoryError
        CUDA refuses it.
    """
    if device.type != "cuda" or size < _LEAST:
        return torch.empty(size, dtype=torch.uint8, pin_memory=device.type != "cpu")
    pages = _Pages(-1, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
    with contextlib.suppress(OSError):
        # huge pages are fewer to pin; some kernels have none
        pages.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(pages, dtype=torch.uint8)
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if error := int(cudart.cudaHostRegister(whole.data_ptr(), whole.nbytes, _PORTABLE)):
        raise PinnedMemoryError(
            f"CUDA cannot pin {whole.nbytes:,} bytes of host memory (error {error})\n"
            "    hint: the node has too little memory left, or the limit of locked memory is too low (ulimit -l)"
        )
    weakref.finalize(pages, _let_go, whole.data_ptr(), device).atexit = False
    return whole[:size]


def empty_in_host_memory(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the kind of ``tensor``, sharded or not, in `pinned_bytes` of the host; uninitialised."""
    local = local_part(tensor)
    own = pinned_bytes(local.nbytes, device).view(local.dtype).view(local.shape)
    if not is_sharded(tensor):
        return own
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 an engine never has one

    return DTensor.from_local(
        own, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


class _Pages(mmap.mmap):
    """System memory as a class of its own, because weak references can watch it."""


def _let_go(pointer: int, device: torch.device) -> None:
    """Unregister pinned memory before its pages return to the system."""
    torch.cuda.synchronize(device)
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    cudart.cudaHostUnregister(pointer)


class Rooms:
    """Pinned memory for temporary tensors of about equal size, such as inputs of layers.

    A room that is free is given to the next tensor that fits into it; one that is too small for it is dropped. So after
    the longest batch there are as many rooms as tensors were held at once, all of one size. The next user of a room
    must queue its writes after the copies of the previous one. On a CPU nothing is kept.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[Tensor] = []

    def take(self, size: int) -> Tensor:
        """Return a buffer of at least ``size`` bytes, ``[bytes]`` uint8, not initialised."""
        self._free = [room for room in self._free if room.nbytes >= size]
        if self._free:
            return self._free.pop()
        return pinned_bytes(size if self._device.type == "cpu" else room_bytes(size), self._device)

    def give_back(self, room: Tensor) -> None:
        """Let others have what `take` returned."""
        if self._device.type != "cpu":
            self._free.append(room)
