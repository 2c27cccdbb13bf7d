"""Owners of update sessions: which of two is the later one, and what is no owner."""

from __future__ import annotations

from typing import Any

import pytest

from hpcrl.weights.session import SessionOwner, read_owner


def test_an_owner_is_read_as_it_was_sent() -> None:
    owner = read_owner([3, 12])
    assert owner == SessionOwner(attempt=3, number=12)
    assert str(owner) == "3.12"
    assert read_owner(list(owner)) == owner


def test_a_call_may_leave_it_out() -> None:
    assert read_owner(None) is None


def test_later_owners_are_greater() -> None:
    """A new attempt is later than every session of the attempts before it."""
    order = [[1, 1], [1, 2], [1, 10], [2, 1], [2, 3], [10, 0]]
    owners = [read_owner(each) for each in order]
    assert sorted(owners, key=lambda owner: owner or (0, 0)) == owners


@pytest.mark.parametrize(
    "value",
    [
        [],
        [1],
        [1, 2, 3],
        (1, 2),
        {"attempt": 1, "number": 2},
        "12",
        12,
        [1, "2"],
        ["1", 2],
        [1, 2.0],
        [True, 2],
        [1, None],
    ],
)
def test_anything_else_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="session must be"):
        read_owner(value)
