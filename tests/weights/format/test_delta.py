"""Deltas of chunks: every change comes back bit for bit, and small ones cost what they should."""

from __future__ import annotations

import numpy as np
import pytest

from hpcrl.errors import HandoffError
from hpcrl.weights.format.delta import apply_chunk, encode_chunk, iter_records


def changed(rng: np.random.Generator, width: int, count: int, share: float, reach: int) -> tuple[bytes, bytes]:
    old = rng.integers(0, 256, count * width, dtype=np.uint8).view(f"<u{width}")
    new, mask = old.copy(), rng.random(count) < share
    new[mask] += rng.integers(-reach, reach + 1, mask.sum()).astype(new.dtype)
    return old.tobytes(), new.tobytes()


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [1, 7, 4096, 100_000])
def test_any_change_comes_back(width: int, count: int) -> None:
    rng = np.random.default_rng([width, count])
    for share in (0.0, 0.0002, 0.05, 1.0):
        for reach in (1, 127, 130, 2 ** (8 * width - 2)):
            old, new = changed(rng, width, count, share, reach)
            record = encode_chunk(5, memoryview(old), memoryview(new), width)
            assert bool(record) == (old != new)
            result = bytearray(old)
            for number, change in iter_records(memoryview(record), width):
                assert number == 5
                apply_chunk(change, memoryview(result), width)
            assert bytes(result) == new
            assert len(record) <= 16 + len(new)


def test_small_steps_of_few_elements_cost_two_bytes_each() -> None:
    rng = np.random.default_rng(0)
    old, new = changed(rng, 2, 1_000_000, 0.04, 2)
    moved = int((np.frombuffer(old, "<u2") != np.frombuffer(new, "<u2")).sum())
    assert len(encode_chunk(0, memoryview(old), memoryview(new), 2)) < 2.01 * moved


def test_damaged_records_are_refused() -> None:
    old, new = changed(np.random.default_rng(1), 2, 1000, 0.1, 3)
    record = encode_chunk(0, memoryview(old), memoryview(new), 2)
    for torn in (record[:-1], record[:10], record + b"x", b"\0\0\0\0\x09" + record[5:]):
        with pytest.raises(HandoffError):
            iter_records(memoryview(torn), 2)
    with pytest.raises(HandoffError, match="behind the end"):
        apply_chunk(memoryview(record), memoryview(bytearray(old[:100])), 2)


# -- the format, by hand


def moved(length: int, changes: dict[int, int], width: int = 2) -> tuple[bytes, bytes]:
    """Elements that are all 1000, and the same with some that moved by so much."""
    old = np.full(length, 1000, dtype=f"<u{width}")
    new = old.copy()
    for place, step in changes.items():
        new[place] += np.array(step).astype(new.dtype)
    return old.tobytes(), new.tobytes()


def record_of(length: int, changes: dict[int, int], *, number: int = 7, width: int = 2) -> bytes:
    old, new = moved(length, changes, width)
    record = encode_chunk(number, memoryview(old), memoryview(new), width)
    back = bytearray(old)
    apply_chunk(memoryview(record), memoryview(back), width)
    assert back == new
    ((found, whole),) = iter_records(record, width)
    assert (found, whole) == (number, record)
    return record


def sparse(number: int, gaps: list[int], steps: list[int], far: bytes = b"", count: int = 0) -> bytes:
    head = number.to_bytes(4, "little") + b"\0\0\0\0" + len(gaps).to_bytes(4, "little") + count.to_bytes(4, "little")
    return head + bytes(gaps) + bytes(steps) + far


def test_a_small_step_is_a_gap_and_twice_its_size() -> None:
    """And one less than that where it goes down."""
    assert record_of(100, {0: 1, 1: -1, 5: 3, 99: -64}) == sparse(7, [0, 0, 3, 93], [2, 1, 6, 127])


@pytest.mark.parametrize(
    ("step", "near"), [(127, True), (128, False), (-128, True), (-129, False), (1 << 15, False), (-1, True)]
)
def test_a_step_of_a_byte_is_near(step: int, near: bool) -> None:
    record = record_of(100, {40: step})
    if near:
        assert record == sparse(7, [40], [2 * step if step > 0 else -2 * step - 1])
    else:
        value = (1000 + step) % (1 << 16)
        assert record == sparse(7, [], [], (40).to_bytes(4, "little") + value.to_bytes(2, "little"), 1)


@pytest.mark.parametrize("width", [2, 4, 8])
def test_elements_of_each_width_are_listed_whole_where_they_moved_far(width: int) -> None:
    value = (5000).to_bytes(width, "little")
    assert record_of(100, {40: 4000}, width=width) == sparse(7, [], [], (40).to_bytes(4, "little") + value, 1)


@pytest.mark.parametrize(
    ("place", "gaps"),
    [(255, [255]), (256, [255, 0]), (511, [255, 255]), (512, [255, 255, 0]), (600, [255, 255, 88])],
)
def test_a_gap_of_more_than_a_byte_is_bridged_by_steps_of_nothing(place: int, gaps: list[int]) -> None:
    assert record_of(2000, {place: 1}) == sparse(7, gaps, [0] * (len(gaps) - 1) + [2])
    # behind another
    assert record_of(2000, {0: 1, place + 1: -1}) == sparse(7, [0, *gaps], [2, *[0] * (len(gaps) - 1), 1])


@pytest.mark.parametrize(
    ("elements", "step", "width", "raw"),
    [(49, 1, 2, False), (50, 1, 2, True), (16, 4000, 2, False), (17, 4000, 2, True), (50, 1, 8, False)],
)
def test_a_chunk_is_written_whole_where_its_changes_are_as_long(
    *, elements: int, step: int, width: int, raw: bool
) -> None:
    """Of fifty elements; a near one takes two bytes, and a far one four more than its own."""
    changes = dict.fromkeys(range(elements), step)
    record = record_of(50, changes, width=width)
    whole = moved(50, changes, width)[1]
    head = (7).to_bytes(4, "little") + b"\1\0\0\0" + len(whole).to_bytes(4, "little") + bytes(4)
    assert (record == head + whole) is raw


def test_what_did_not_change_has_no_record() -> None:
    old, _ = moved(10, {})
    assert encode_chunk(7, memoryview(old), memoryview(old), 2) == b""
    assert iter_records(b"", 2) == []


def test_records_follow_each_other_and_none_is_torn() -> None:
    parts = [record_of(100, {3: 1, 50: 4000}, number=1), record_of(10, dict.fromkeys(range(10), 9), number=4)]
    assert parts[1][4] == 1
    data = b"".join(parts)
    assert [(number, bytes(record)) for number, record in iter_records(data, 2)] == [(1, parts[0]), (4, parts[1])]
    whole = {0, len(parts[0]), len(data)}
    for end in range(len(data)):
        if end not in whole:
            with pytest.raises(HandoffError, match="a record of a delta is torn"):
                iter_records(data[:end], 2)
    with pytest.raises(HandoffError, match="unknown encoding 2"):
        iter_records(data[:4] + b"\2" + data[5:], 2)


@pytest.mark.parametrize("step", [1, 4000])
def test_a_record_ends_with_its_chunk(step: int) -> None:
    old, new = moved(100, {99: step})
    record = memoryview(encode_chunk(0, memoryview(old), memoryview(new), 2))
    apply_chunk(record, memoryview(bytearray(old)), 2)
    with pytest.raises(HandoffError, match="behind the end of its chunk"):
        apply_chunk(record, memoryview(bytearray(old[:-2])), 2)


def test_a_whole_chunk_has_the_length_of_the_one_before() -> None:
    old, new = moved(10, dict.fromkeys(range(10), 9))
    record = memoryview(encode_chunk(0, memoryview(old), memoryview(new), 2))
    for other in (old[:-2], old + b"\0\0"):
        with pytest.raises(HandoffError, match="another length than the parent's"):
            apply_chunk(record, memoryview(bytearray(other)), 2)
