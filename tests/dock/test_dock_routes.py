"""Routed experts on their way: what they may be, and how those of several rollouts are packed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hpcrl.dock.routes import RoutedExperts, exact_dtype, joined


@pytest.mark.parametrize(
    ("experts", "dtype"),
    [(0, "uint8"), (1, "uint8"), (256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")],
)
def test_the_smallest_dtype_that_holds_the_last_expert(experts: int, dtype: str) -> None:
    assert exact_dtype(experts) == np.dtype(dtype)


def rows(tokens: int, first: int = 0, *, layers: int = 2, width: int = 3, dtype: str = "u1") -> RoutedExperts:
    numbers = first + np.arange(tokens * layers * width).reshape(tokens, layers, width)
    return RoutedExperts.of(numbers.astype(dtype), np.arange(tokens, dtype=np.uint8) % 2)


def test_what_goes_in_comes_out_uncopied() -> None:
    numbers = np.arange(24, dtype="<u2").reshape(4, 3, 2)
    present = np.asarray([1, 0, 1, 1], dtype=np.uint8)
    made = RoutedExperts.of(numbers, present)
    assert (made.dtype, made.shape, made.data.nbytes) == ("<u2", (4, 3, 2), 48)
    assert np.array_equal(made.experts, numbers)
    assert made.known.tolist() == [True, False, True, True]
    assert np.shares_memory(made.experts, numbers)
    assert np.array_equal(RoutedExperts.of(numbers[::2], present[::2]).experts, numbers[::2])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "<i2"}, "routed experts are unsigned integers, not <i2"),
        ({"dtype": "<f2"}, "routed experts are unsigned integers, not <f2"),
        ({"shape": (3, 3, 2)}, r"48 bytes are not \(3, 3, 2\) of <u2"),
        ({"shape": (-4, -3, 2)}, r"48 bytes are not \(-4, -3, 2\) of <u2"),
        ({"present": memoryview(b"111")}, "3 flags for 4 rows of routed experts"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    whole: dict[str, Any] = {"dtype": "<u2", "shape": (4, 3, 2), "data": memoryview(bytes(48))}
    whole["present"] = memoryview(bytes(4))
    RoutedExperts(**whole)
    with pytest.raises(ValueError, match=message):
        RoutedExperts(**{**whole, **changes})


def test_rollouts_are_packed_one_behind_the_other() -> None:
    found = joined([None, rows(2, 10), None, rows(1, 70)], [3, 2, 1, 1])
    assert found is not None
    assert found.shape == (7, 2, 3)
    assert found.known.tolist() == [False, False, False, False, True, False, False]
    wanted = np.zeros((7, 2, 3), dtype=np.uint8)
    wanted[3:5] = 10 + np.arange(12).reshape(2, 2, 3)
    wanted[6] = 70 + np.arange(6).reshape(2, 3)
    assert np.array_equal(found.experts, wanted)
    assert joined([None, None], [3, 2]) is None


@pytest.mark.parametrize("other", [rows(2, layers=3), rows(2, width=2), rows(2, dtype="<u2"), rows(3)])
def test_rollouts_that_differ_are_refused(other: RoutedExperts) -> None:
    with pytest.raises(ValueError, match="experts of a sequence of 2 tokens do not fit"):
        joined([rows(2), other], [2, 2])
