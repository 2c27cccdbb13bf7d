"""Host memory for versions on their way to a worker: each has its own, and the next one takes it over."""

from __future__ import annotations

import itertools
import logging

import pytest
import torch
from torch import Tensor

from hpcrl.inference.vllm.version_memory import VersionMemory
from hpcrl.modeling.memory.host_memory import PinnedMemoryError

#: a device that is not a processor, so that memory is kept, and needs no driver
OTHER = torch.device("meta")


class Pinned:
    """Allocates ordinary memory and remembers the sizes."""

    def __init__(self, limit: int | None = None) -> None:
        self.sizes: list[int] = []
        self.limit = limit

    def __call__(self, size: int, device: torch.device) -> Tensor:
        if self.limit is not None and sum(self.sizes) + size > self.limit:
            raise PinnedMemoryError("no more")
        self.sizes.append(size)
        return torch.empty(size, dtype=torch.uint8)


def small_version(seed: int) -> list[Tensor]:
    made = torch.Generator().manual_seed(seed)
    shapes = ((7, 3), (), (0, 4), (64, 16), (5,))
    return [torch.randn(shape, generator=made).to(torch.bfloat16) for shape in shapes]


def bounds(tensors: list[Tensor]) -> list[tuple[int, int]]:
    return sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors if t.nbytes)


@pytest.mark.parametrize("segment_bytes", [1, 600, 4096])
def test_copies_are_equal_and_share_no_byte(segment_bytes: int) -> None:
    lease = VersionMemory(OTHER, segment_bytes=segment_bytes, pin=Pinned()).lend()
    tensors = [*small_version(1), torch.randn(16, 8).T]
    copies = [lease.copy_of(tensor) for tensor in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        assert torch.equal(copy, tensor)
        assert copy.dtype == tensor.dtype
        assert copy.is_contiguous()
    places = bounds(copies)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(places))
    assert bounds(copies + tensors) == sorted(places + bounds(tensors))


def test_the_next_version_takes_the_same_memory() -> None:
    pin = Pinned()
    memory = VersionMemory(OTHER, segment_bytes=600, pin=pin)
    lease = memory.lend()
    first = [lease.copy_of(tensor) for tensor in small_version(1)]
    memory.give_back(lease)
    allocated = list(pin.sizes)
    for seed in (2, 3):
        lease = memory.lend()
        copies = [lease.copy_of(tensor) for tensor in small_version(seed)]
        assert all(torch.equal(*pair) for pair in zip(copies, small_version(seed), strict=True))
        assert [copy.data_ptr() for copy in copies] == [copy.data_ptr() for copy in first]
        memory.give_back(lease)
    assert pin.sizes == allocated


def test_versions_at_the_same_time_have_memory_of_their_own() -> None:
    """A version that was given up may still be written to, and the next one must not see it."""
    pin = Pinned()
    memory = VersionMemory(OTHER, segment_bytes=600, pin=pin)
    given_up, next_one = memory.lend(), memory.lend()
    kept = [next_one.copy_of(tensor) for tensor in small_version(2)]
    for tensor in small_version(1):
        given_up.copy_of(tensor)
    assert all(torch.equal(*pair) for pair in zip(kept, small_version(2), strict=True))
    memory.give_back(given_up)
    memory.give_back(next_one)
    # the memory of one version is kept
    again = memory.lend()
    allocated = len(pin.sizes)
    for tensor in small_version(3):
        again.copy_of(tensor)
    assert len(pin.sizes) == allocated
    beside = memory.lend()
    beside.copy_of(small_version(4)[0])
    assert len(pin.sizes) == allocated + 1


def test_the_larger_memory_is_kept() -> None:
    pin = Pinned()
    memory = VersionMemory(OTHER, segment_bytes=512, pin=pin)
    small, large = memory.lend(), memory.lend()
    small.copy_of(torch.zeros(8))
    large.copy_of(torch.zeros(1000))
    memory.give_back(large)
    memory.give_back(small)
    memory.lend().copy_of(torch.zeros(1000))
    assert len(pin.sizes) == 2


def test_few_segments_for_many_tensors() -> None:
    pin = Pinned()
    lease = VersionMemory(OTHER, segment_bytes=1 << 16, pin=pin).lend()
    for _ in range(100):
        lease.copy_of(torch.zeros(64))
    lease.copy_of(torch.zeros(1 << 16))
    lease.copy_of(torch.zeros(64))
    assert pin.sizes == [1 << 16, 1 << 18]


def test_of_a_processor_nothing_is_kept_and_nothing_is_rounded_up_to_segments() -> None:
    pin = Pinned()
    memory = VersionMemory(torch.device("cpu"), pin=pin)
    for _ in range(2):
        lease = memory.lend()
        lease.copy_of(torch.zeros(256))
        memory.give_back(lease)
    assert pin.sizes == [1024, 1024]


def test_memory_that_cannot_be_pinned_makes_updates_slow_and_not_impossible(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("vllm.hpcrl")
    logger.addHandler(caplog.handler)
    try:
        lease = VersionMemory(OTHER, segment_bytes=600, pin=Pinned(limit=600)).lend()
        copies = [lease.copy_of(tensor) for tensor in small_version(1)]
    finally:
        logger.removeHandler(caplog.handler)
    assert all(torch.equal(*pair) for pair in zip(copies, small_version(1), strict=True))
    assert "pageable memory" in caplog.text
    assert "no more" in caplog.text
