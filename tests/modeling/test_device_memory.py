"""Memory that goes and comes under a tensor, arrays on their way to a device, and sums of rows."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from hpcrl.modeling.memory import transfer
from hpcrl.modeling.memory.arena import Arena, Memory, give_to_others, memory_of
from hpcrl.modeling.memory.transfer import kept_for_layers, movable, move, to_device
from hpcrl.modeling.sums import add_rows, count_rows, running_sums

CPU = torch.device("cpu")


# -- memory


def test_an_arena_knows_the_most_that_there_was() -> None:
    arena = Arena()
    arena.add(device=5)
    arena.add(device=-3, host=7)
    arena.add(host=-7)
    arena.add(device=1)
    assert (arena.device_bytes, arena.host_bytes, arena.device_peak, arena.host_peak) == (3, 0, 5, 7)


def test_memory_goes_and_comes_under_a_tensor_and_its_views() -> None:
    x = torch.arange(6, dtype=torch.int32)
    view = x.view(2, 3)[1]
    (memory,) = memory_of([x])
    assert (memory.size, memory.is_there) == (24, True)
    kept = memory.bytes().clone()
    assert kept.dtype == torch.uint8
    assert kept.view(torch.int32).tolist() == [0, 1, 2, 3, 4, 5]
    memory.give_back()
    assert not memory.is_there
    assert (x.untyped_storage().nbytes(), x.shape, memory.size) == (0, (6,), 24)
    assert memory_of([x]) == []
    memory.take()
    assert memory.is_there
    memory.bytes().copy_(kept)
    assert view.tolist() == [3, 4, 5]


def test_memory_that_is_shared_is_one() -> None:
    x, y = torch.zeros(4), torch.zeros(2, requires_grad=True)
    found = memory_of([x[1:3], y, x.view(2, 2), y.detach()])
    assert [memory.size for memory in found] == [16, 8]
    assert len({memory.key for memory in found}) == 2
    assert found[0].key == memory_of([x])[0].key
    assert isinstance(found[0], Memory)
    give_to_others(CPU)  # a processor's is with others already


# -- on the way to a device


def test_arrays_of_the_host_stay_as_they_are() -> None:
    tensors = [torch.arange(3), torch.zeros(0)]
    found = to_device(tensors, CPU)
    assert all(own is theirs for own, theirs in zip(found, tensors, strict=True))


def test_arrays_side_by_side_begin_where_wide_words_do() -> None:
    tensors = [
        torch.tensor([[1, 2], [3, 4]]),
        torch.tensor(True),
        torch.zeros(0, 3),
        torch.arange(5, dtype=torch.float16),
        torch.arange(17, dtype=torch.uint8),
        torch.tensor(2.5, dtype=torch.float64),
    ]
    together = transfer._together(tensors, pinned=False)
    assert len(together) == 32 + 16 + 0 + 16 + 32 + 16
    found = transfer._apart(together, tensors)
    for own, theirs in zip(found, tensors, strict=True):
        assert (own.dtype, own.shape) == (theirs.dtype, theirs.shape)
        assert torch.equal(own, theirs)
        assert own.data_ptr() % 16 == together.data_ptr() % 16 or not own.numel()


@movable
class Pair:
    def __init__(self, x: torch.Tensor, name: str) -> None:
        self.x, self.name = x, name


Both = namedtuple("Both", "one two")


def test_tensors_are_found_wherever_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[list[float]]()

    def moved(tensors: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        seen.append([float(tensor) for tensor in tensors])
        return [tensor + 100 for tensor in tensors]

    monkeypatch.setattr(transfer, "to_device", moved)
    one, two, three, four = (torch.tensor(float(number)) for number in range(1, 5))
    values = {"a": [one, "text"], "b": Pair(two, "pair"), "c": Both(three, None), "d": (four, 7)}
    found = move(values, CPU)
    assert sorted(seen[0]) == [1.0, 2.0, 3.0, 4.0]
    assert len(seen) == 1  # by one copy
    assert (float(found["a"][0]), found["a"][1]) == (101.0, "text")
    assert (float(found["b"].x), found["b"].name, type(found["b"])) == (102.0, "pair", Pair)
    assert (float(found["c"].one), found["c"].two) == (103.0, None)
    assert (float(found["d"][0]), found["d"][1]) == (104.0, 7)
    assert float(values["b"].x) == 2.0  # of another object


def test_the_last_results_are_kept_for_the_layers_of_a_pass() -> None:
    made = list[int]()

    @kept_for_layers(2)
    def double(number: int) -> int:
        made.append(number)
        return 2 * number

    assert [double(number) for number in (1, 2, 1, 2, 3, 2, 1)] == [2, 4, 2, 4, 6, 4, 2]
    assert made == [1, 2, 3, 1]


def test_results_are_real_where_others_are_fake() -> None:
    @kept_for_layers(1)
    def ones(number: int) -> torch.Tensor:
        return torch.ones(number)

    with FakeTensorMode():
        assert isinstance(torch.ones(2), FakeTensor)
        assert not isinstance(ones(2), FakeTensor)
    assert ones(2).tolist() == [1.0, 1.0]


# -- sums


def test_numbers_are_counted() -> None:
    assert count_rows(torch.tensor([3, 0, 3, 3]), 5).tolist() == [1, 0, 0, 3, 0]
    assert count_rows(torch.zeros(0, dtype=torch.int64), 2).tolist() == [0, 0]


def test_rows_are_added_to_those_that_are_named() -> None:
    target = torch.tensor([[1.0, 2], [3, 4], [5, 6]])
    found = add_rows(target, torch.tensor([2, 0, 2]), torch.tensor([[10.0, 20], [30, 40], [100, 200]]))
    assert found is target
    assert target.tolist() == [[31, 42], [3, 4], [115, 226]]


@pytest.mark.parametrize("deterministic", [True, False])
def test_running_sums_are_those_up_to_a_row(deterministic: bool) -> None:
    x = torch.tensor([[[1.0, 10], [2, 20], [3, 30]], [[5, 0], [6, 0], [7, 0]]])
    expected = [[[1, 10], [3, 30], [6, 60]], [[5, 0], [11, 0], [18, 0]]]
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic)
    try:
        assert running_sums(x).tolist() == expected
    finally:
        torch.use_deterministic_algorithms(before)
