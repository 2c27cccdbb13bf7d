"""Pinned memory has the size that is asked for, and goes back to the system when nobody has it any more."""

from __future__ import annotations

import gc
import mmap
from collections.abc import Iterator

import pytest
import torch
from torch.cuda import _pin_memory_utils

from hpcrl.modeling.memory.host_memory import PinnedMemoryError, Rooms, pinned_bytes
from hpcrl.models.rooms import room_bytes

CUDA = torch.device("cuda", 0)
MIB = 1 << 20
PORTABLE = 1


class Cudart:
    """CUDA's runtime: what it was told of, in order; `error` is what it answers."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.waits = 0
        self.error = 0

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:
        assert flags == PORTABLE
        if not self.error:
            self.pinned[pointer] = size
        return self.error

    def cudaHostUnregister(self, pointer: int) -> int:
        assert self.waits, "copies may be under way"
        del self.pinned[pointer]
        return 0

    def synchronize(self, device: torch.device) -> None:
        assert device == CUDA
        self.waits += 1


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cudart]:
    fake = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch.cuda, "synchronize", fake.synchronize)
    yield fake
    gc.collect()
    assert not fake.pinned


@pytest.mark.parametrize("size", [MIB, MIB + 1, 3 * MIB - 5, 37_000_111])
def test_whole_pages_of_the_size_are_pinned(cudart: Cudart, size: int) -> None:
    found = pinned_bytes(size, CUDA)
    ((pointer, pinned),) = cudart.pinned.items()
    assert (found.dtype, found.shape, found.data_ptr()) == (torch.uint8, (size,), pointer)
    assert pointer % mmap.PAGESIZE == 0
    assert size <= pinned < size + mmap.PAGESIZE
    found.fill_(7)
    assert int(found[-1]) == 7


def test_memory_goes_back_with_its_last_view(cudart: Cudart) -> None:
    """Behind the copies that the device still makes."""
    found = pinned_bytes(2 * MIB, CUDA)
    view = found.view(torch.float32)[5:].view(-1, 1)
    del found
    gc.collect()
    assert cudart.pinned
    view.fill_(1.0)
    del view
    gc.collect()
    assert not cudart.pinned
    assert cudart.waits == 1


def test_what_cuda_refuses_is_reported(cudart: Cudart) -> None:
    cudart.error = 2
    with pytest.raises(PinnedMemoryError, match=r"cannot pin 5,001,216 bytes .*error 2(.|\n)*ulimit -l"):
        pinned_bytes(5_000_000, CUDA)


def test_a_processor_has_ordinary_memory(cudart: Cudart) -> None:
    assert pinned_bytes(4 * MIB, torch.device("cpu")).shape == (4 * MIB,)
    assert not cudart.pinned


def test_rooms_are_given_again(cudart: Cudart) -> None:
    rooms = Rooms(CUDA)
    first, second = rooms.take(4 * MIB), rooms.take(4 * MIB - 100)
    places = {first.data_ptr(), second.data_ptr()}
    assert len(places) == 2
    for room in (first, second):
        rooms.give_back(room)
    again = [rooms.take(size) for size in (3 * MIB, 2 * MIB)]
    assert {room.data_ptr() for room in again} == places
    for room in (*again, first, second):
        assert room.nbytes >= 4 * MIB - 100
    # a longer batch: what is too small is let go of when the first tensor comes that does not fit
    del first, second, room
    for room in again:
        rooms.give_back(room)
    del again, room
    large = rooms.take(4 * MIB + 1)
    gc.collect()
    assert list(cudart.pinned) == [large.data_ptr()]
    assert large.nbytes == room_bytes(4 * MIB + 1)


@pytest.mark.parametrize("size", [1, 2, 17, 1000, 402_653_184, 402_653_185, 3 * 10**9])
def test_a_room_is_little_larger_than_what_it_is_for(size: int) -> None:
    room = room_bytes(size)
    assert size <= room <= size * 1.125
    assert room_bytes(room) == room
    # 16 sizes between two powers of two
    assert len({room_bytes(n) for n in range(65_537, 131_073, 7)}) == 8


def test_cuda_is_asked_as_torch_itself_does(cudart: Cudart) -> None:
    """A build for processors has no runtime of CUDA, but torch's module that registers memory."""
    memory = torch.empty(2 * MIB, dtype=torch.uint8)
    _pin_memory_utils.pin_memory(memory.data_ptr(), memory.nbytes)
    assert cudart.pinned == {memory.data_ptr(): memory.nbytes}
    cudart.synchronize(CUDA)
    _pin_memory_utils.unpin_memory(memory.data_ptr())
