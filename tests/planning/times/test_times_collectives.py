"""Seconds of collectives: bytes over the link that has to carry most of them."""

from __future__ import annotations

import pytest

from hpcrl.planning.collectives import Links, RankGroup, all_gather, all_reduce, all_to_all

LINKS = Links(gpu=400e9, node=400e9, gpus_per_node=8, hop_s=0.0, local_hop_s=0.0)


def test_one_rank_sends_nothing() -> None:
    alone = RankGroup(1, 1)
    assert all_gather(1e9, alone, LINKS) == all_to_all(1e9, alone, LINKS) == 0.0


def test_within_a_node_a_rank_receives_what_it_lacks() -> None:
    assert all_gather(8e9, RankGroup.inner(8, 8), LINKS) == pytest.approx(8e9 * 7 / 8 / 400e9)
    assert all_reduce(8e9, RankGroup.inner(8, 8), LINKS) == pytest.approx(2 * 8e9 * 7 / 8 / 400e9)


def test_between_nodes_ranks_of_one_group_share_what_their_node_receives() -> None:
    # 16 ranks on 2 nodes: a node lacks half, and gets it once for its 8 ranks
    whole = all_gather(8e9, RankGroup.inner(16, 8), LINKS)
    assert whole == pytest.approx(max(8e9 * 15 / 16 / 400e9, 8e9 / 2 / 400e9))
    # 8 groups of 2 ranks, one on each node: every group's half crosses, eight times as many bytes
    outer = RankGroup.outer(2, 8, 8)
    assert (outer.per_node, outer.nodes) == (1, 2)
    assert all_gather(8e9, outer, LINKS) == pytest.approx(8 * 8e9 / 2 / 400e9)


def test_dispatch_over_many_nodes_is_bound_by_the_adapters() -> None:
    near = all_to_all(1e9, RankGroup.inner(8, 8), LINKS)
    far = all_to_all(1e9, RankGroup.inner(64, 8), LINKS)
    assert near == pytest.approx(1e9 * 7 / 8 / 400e9)
    # 56 of 64 parts leave the node, over an eighth of its adapters
    assert far == pytest.approx(1e9 * 56 / 64 * 8 / 400e9)


def test_latency_grows_with_the_depth_of_the_tree() -> None:
    slow = Links(gpu=1e30, node=1e30, gpus_per_node=8, hop_s=1.0, local_hop_s=0.0)
    assert all_gather(1.0, RankGroup.inner(16, 8), slow) == pytest.approx(1.0)
    assert all_gather(1.0, RankGroup.inner(128, 8), slow) == pytest.approx(4.0)


def test_little_within_a_node_is_reduced_in_one_shot() -> None:
    """A ring of eight waits fourteen times; one shot waits twice, and reads what the other seven have."""
    links = Links(gpu=400e9, node=400e9, gpus_per_node=8, hop_s=10e-6, local_hop_s=3e-6)
    node = RankGroup.inner(8, 8)
    assert all_reduce(16e3, node, links) == pytest.approx(7 * 16e3 / 400e9 + 2 * 3e-6)
    assert all_reduce(8e9, node, links) == pytest.approx(2 * all_gather(8e9, node, links))
    # between nodes there is no such kernel
    assert all_reduce(16e3, RankGroup.inner(16, 8), links) == 2 * all_gather(16e3, RankGroup.inner(16, 8), links)
    assert all_reduce(16e3, RankGroup(1, 1), links) == 0.0
