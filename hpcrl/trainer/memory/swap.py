"""The trainer's tensors in host memory while engines have the device.

Copies overlap with computation (`hpcrl.trainer.memory.copies`): while the last one is still under way, the next
is gathered for the engines. Memory of the device is free when its copy is finished.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from hpcrl.modeling.memory.arena import Arena, Memory, give_to_others, memory_of
from hpcrl.trainer.memory.copies import StartedCopy, copies_of, host_like


class _Leaving(NamedTuple):
    memory: Memory
    host: Tensor
    copy: StartedCopy


class HostSwap:
    """Moves the memory of tensors to the host and back; the tensors stay the same objects."""

    def __init__(self, device: torch.device, arena: Arena) -> None:
        """Prepare; no tensor is swapped out yet.

        Parameters
        ----------
        device:
            Device whose memory is released.
        arena:
            Counts the memory.
        """
        self._device, self.arena = device, arena
        self._copies = copies_of(device)
        self._leaving: list[_Leaving] = []
        self._away: list[tuple[Memory, Tensor]] = []
        # pinned memory is expensive to allocate: buffers are kept for the next time
        self._rooms: dict[int, list[Tensor]] = {}

    def leave(self, tensors: Iterable[Tensor]) -> None:
        """Begin to move the memory of ``tensors``, of any shapes, to the host; free what was begun before this call.

        Of sharded ones this rank's parts go. What is away already, or begun, is left out.
        """
        before, self._leaving = self._leaving, []
        # memory whose copy has begun is still allocated, and about to be freed
        begun = {leaving.memory.key for leaving in before}
        for memory in memory_of(tensors):
            if memory.key in begun:
                continue
            host = self._room(memory)
            self.arena.add(host=memory.size)
            self._leaving.append(_Leaving(memory, host, self._copies.start(host, memory.bytes())))
        self._free(before)

    def finish(self) -> None:
        """Free what is still on its way; then other processes can have the memory."""
        before, self._leaving = self._leaving, []
        self._free(before)
        give_to_others(self._device)

    def back(self) -> None:
        """Bring all of it back to the device."""
        self.finish()
        away, self._away = self._away, []
        coming = []
        for memory, host in away:
            memory.take()
            self.arena.add(device=memory.size)
            coming.append(self._copies.start(memory.bytes(), host))
        for copy in coming:
            copy.finish()
        if self._device.type != "cpu":
            # the host memory may be written again from now on
            torch.accelerator.synchronize(self._device)
        for memory, host in away:
            self.arena.add(host=-memory.size)
            if self._device.type != "cpu":
                self._rooms.setdefault(memory.size, []).append(host)

    def _free(self, leaving: list[_Leaving]) -> None:
        for memory, host, copy in leaving:
            copy.finish()
            memory.give_back()
            self.arena.add(device=-memory.size)
            self._away.append((memory, host))

    def _room(self, memory: Memory) -> Tensor:
        if rooms := self._rooms.get(memory.size):
            return rooms.pop()
        return host_like(memory.bytes(), self._device)
