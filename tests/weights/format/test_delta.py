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
