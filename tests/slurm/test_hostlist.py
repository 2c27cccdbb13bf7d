"""Host lists as Slurm writes them."""

from __future__ import annotations

import pytest

from hpcrl.slurm.hostlist import expand_hostlist


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("login", ("login",)),
        ("a,b", ("a", "b")),
        ("h200-[001-003,007]", ("h200-001", "h200-002", "h200-003", "h200-007")),
        ("n[9-11]", ("n9", "n10", "n11")),
        ("r[1-2]c[0-1]", ("r1c0", "r1c1", "r2c0", "r2c1")),
        ("a[1,3]-ib,b2.example.org", ("a1-ib", "a3-ib", "b2.example.org")),
        ("n[098-101]\n", ("n098", "n099", "n100", "n101")),
    ],
)
def test_expand(text: str, hosts: tuple[str, ...]) -> None:
    assert expand_hostlist(text) == hosts


@pytest.mark.parametrize("text", ["", "a,", "a[1-2", "a]1[", "a[x]", "a[1-]", ",a", "(null)[1,]"])
def test_what_is_none(text: str) -> None:
    with pytest.raises(ValueError, match="host list"):
        expand_hostlist(text)
