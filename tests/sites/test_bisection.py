"""Which nodes are to blame, from groups that work or do not: faults are invented, and each try is counted."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection

import pytest

from hpcrl.sites.bisection import Faults, find_faults

Pairs = Collection[frozenset[str]]


def names(count: int) -> list[str]:
    return [f"n{i}" for i in range(count)]


class Network:
    """Groups fail that have a bad node beside another one, or both ends of a bad pair, or all of a bad group."""

    def __init__(self, bad: Collection[str] = (), pairs: Collection[Collection[str]] = ()) -> None:
        self.bad, self.pairs = set(bad), [set(pair) for pair in pairs]
        self.tries: list[tuple[str, ...]] = []

    def works(self, group: tuple[str, ...]) -> bool:
        assert len(set(group)) == len(group)
        self.tries.append(group)
        return not (len(group) > 1 and self.bad & set(group)) and not any(pair <= set(group) for pair in self.pairs)


def found(faults: Faults) -> tuple[set[str], set[frozenset[str]]]:
    assert (faults.groups, faults.open) == ((), ())
    return set(faults.nodes), {frozenset(pair) for pair in faults.pairs}


@pytest.mark.parametrize("count", [1, 2, 3, 28])
def test_a_sound_set_takes_one_try(count: int) -> None:
    network = Network()
    assert find_faults(names(count), network.works) == Faults(sound=tuple(names(count)))
    assert len(network.tries) == 1


@pytest.mark.parametrize("count", [3, 4, 5, 8, 28])
def test_one_bad_node_is_found_wherever_it_is(count: int) -> None:
    for node in names(count):
        network = Network(bad=[node])
        assert found(find_faults(names(count), network.works)) == ({node}, set())
        assert len(network.tries) <= 2 * math.log2(count) + 5


@pytest.mark.parametrize("count", [3, 4, 7, 16])
def test_one_bad_pair_is_found_wherever_it_is(count: int) -> None:
    for pair in itertools.combinations(names(count), 2):
        network = Network(pairs=[pair])
        assert found(find_faults(names(count), network.works)) == (set(), {frozenset(pair)})
        assert len(network.tries) <= 2 * math.log2(count) + 6


@pytest.mark.parametrize("count", [4, 5, 9])
def test_two_bad_nodes_are_found_wherever_they_are(count: int) -> None:
    for bad in itertools.combinations(names(count), 2):
        assert found(find_faults(names(count), Network(bad=bad).works)) == (set(bad), set())


def test_a_bad_node_and_a_bad_pair() -> None:
    network = Network(bad=["n6"], pairs=[["n1", "n3"]])
    assert found(find_faults(names(9), network.works)) == ({"n6"}, {frozenset(["n1", "n3"])})


def test_two_nodes_that_fail_together_are_not_distinguished() -> None:
    assert found(find_faults(names(2), Network(bad=["n0"]).works)) == (set(), {frozenset(["n0", "n1"])})


def test_a_node_that_fails_alone_is_bad() -> None:
    faults = find_faults(names(2), lambda group: "n1" not in group)
    assert (faults.nodes, faults.pairs, faults.sound) == (("n1",), (), ("n0",))


def test_what_fails_only_in_a_larger_group_is_not_a_pair() -> None:
    faults = find_faults(names(4), Network(pairs=[["n0", "n1", "n3"]]).works)
    assert (faults.nodes, faults.pairs) == ((), ())
    assert [set(group) for group in faults.groups] == [{"n0", "n1", "n3"}]


def test_where_time_is_over_the_rest_is_open() -> None:
    network = Network(bad=["n6"])
    faults = find_faults(names(8), network.works, may_go_on=lambda: len(network.tries) < 3)
    assert len(network.tries) == 3
    assert faults.nodes == ()
    assert "n6" in faults.open
    assert find_faults(names(8), network.works, most=0).open == tuple(names(8))
