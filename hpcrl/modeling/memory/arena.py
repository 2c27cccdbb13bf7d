"""Releases the memory of tensors while another process uses the device, and allocates it again for the same tensors.

A tensor keeps its identity, its shape and its views: only the memory below it (its storage) goes and comes. So nothing
that holds a tensor (an optimizer, FSDP2, a compiled graph) needs an update. On a CPU, which stands in for a device,
the memory really goes back too.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from hpcrl.modeling.blocks import local_part


class Arena:
    """Counts what one process has of a device, and of the host for it.

    Attributes
    ----------
    device_bytes, host_bytes:
        Now.
    device_peak, host_peak:
        Maximum bytes since the arena was made.
    """

    def __init__(self) -> None:
        self.device_bytes = self.host_bytes = self.device_peak = self.host_peak = 0

    def add(self, *, device: int = 0, host: int = 0) -> None:
        """Add a number of bytes (subtract if negative)."""
        self.device_bytes += device
        self.host_bytes += host
        self.device_peak = max(self.device_peak, self.device_bytes)
        self.host_peak = max(self.host_peak, self.host_bytes)


class Memory:
    """The memory below one or more tensors. Made while it is there.

    Attributes
    ----------
    key:
        The same for all that share it.
    size:
        Bytes, also while it is away.
    """

    def __init__(self, storage: torch.UntypedStorage, device: torch.device) -> None:
        self._storage, self._device, self.size = storage, device, storage.nbytes()
        self.key: int = storage._cdata

    @property
    def is_there(self) -> bool:
        return self._storage.nbytes() > 0

    def take(self) -> None:
        """Take the memory again; what is in it is not known."""
        self._storage.resize_(self.size)

    def give_back(self) -> None:
        """Give the memory back; what was in it is lost."""
        self._storage.resize_(0)

    def bytes(self) -> Tensor:
        """Return all of it as ``[size]`` uint8."""
        own = torch.empty(0, dtype=torch.uint8, device=self._device)
        return own.set_(self._storage, 0, (self.size,), (1,))


def memory_of(tensors: Iterable[Tensor]) -> list[Memory]:
    """Return the memory of tensors of any shape and dtype, or of this rank's parts of them (`blocks.local_part`).

    Memory that several tensors share appears once; released memory does not appear. The whole storage of a tensor
    counts, also the part that the tensor does not show.
    """
    found: dict[int, Memory] = {}
    with torch.no_grad():
        for tensor in tensors:
            own = local_part(tensor.detach())
            storage = own.untyped_storage()
            if storage.nbytes():
                memory = Memory(storage, own.device)
                found.setdefault(memory.key, memory)
    return list(found.values())


def give_to_others(device: torch.device) -> None:
    """Let other processes have what was given back: an accelerator's allocator keeps it else."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
        torch.accelerator.empty_cache()
