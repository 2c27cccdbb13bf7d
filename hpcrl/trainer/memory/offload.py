"""Inputs of layers that wait for the backward pass in host memory, with a bound on what is in flight."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from hpcrl.modeling.memory.host_memory import Rooms
from hpcrl.trainer.memory.copies import Copies, StartedCopy, copies_of


class ActivationOffload:
    """A `hpcrl.trainer.memory.recompute.Hold` that keeps tensors in host memory.

    A tensor takes device memory until its copy to the host is finished, and again from the start of the copy back,
    which is made while another layer is computed. These bytes are in flight: before they would be more than the bound
    the oldest copies are finished. One tensor at a time may always be.
    """

    def __init__(self, device: torch.device, *, bound_bytes: int, copies: Copies | None = None) -> None:
        """Prepare; no activation is held yet.

        Parameters
        ----------
        bound_bytes:
            Maximum bytes in flight, unless a single tensor has more.
        copies:
            Function that makes copies; None: the device's default.
        """
        self._device, self._bound = device, bound_bytes
        # one row of copies: a room is written again behind the copy that reads it
        self._copies, self._rooms = copies or copies_of(device), Rooms(device)
        self._leaving: deque[_Held] = deque()
        self._coming: _Held | None = None
        # weak references: the holder of a tensor decides its lifetime, and a pass without a backward pass leaves none
        self._held: list[weakref.ref[_Held]] = []

    @property
    def bytes_in_flight(self) -> int:
        """Return the bytes of device memory that are held for copies."""
        coming = () if self._coming is None else (self._coming,)
        return sum(held.host.nbytes for held in (*self._leaving, *coming))

    def __call__(self, x: Tensor) -> Callable[[], Tensor]:
        """Begin to copy ``x`` to the host; what is returned brings it back, once."""
        while self._leaving and self.bytes_in_flight + x.nbytes > self._bound:
            self._leave()
        room = self._rooms.take(x.nbytes)
        host = room[: x.nbytes].view(x.dtype).view(x.shape)
        held = _Held(room, host, x, self._copies.start(host, x))
        self._leaving.append(held)
        self._held.append(weakref.ref(held))
        return lambda: self._bring(held)

    def _leave(self) -> None:
        held = self._leaving.popleft()
        held.copy.finish()
        held.here = None

    def _bring(self, held: _Held) -> Tensor:
        """Return the tensor on the device, and start to copy back the one that is needed next."""
        self._held = [other for other in self._held if other() not in (None, held)]
        if held in self._leaving:
            # it has not left yet
            self._leaving.remove(held)
        elif held is not self._coming:
            self._come(held)
        if held is self._coming:
            self._coming = None
        held.copy.finish()
        found, held.here = held.here, None
        assert found is not None
        self._rooms.give_back(held.room)
        following = self._held[-1]() if self._held else None
        if following is not None and following.here is None and self._coming is None:
            while self._leaving and self.bytes_in_flight + following.host.nbytes > self._bound:
                self._leave()
            self._come(following)
        return found.detach().requires_grad_(held.requires_grad)

    def _come(self, held: _Held) -> None:
        held.here = torch.empty_like(held.host, device=self._device)
        held.copy = self._copies.start(held.here, held.host)
        self._coming = held


class _Held:
    """A tensor; ``here`` while it is on the device."""

    def __init__(self, room: Tensor, host: Tensor, here: Tensor, copy: StartedCopy) -> None:
        self.room, self.host, self.copy, self.requires_grad = room, host, copy, here.requires_grad
        self.here: Tensor | None = here
