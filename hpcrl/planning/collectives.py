"""Seconds of collectives over the links of a node and between nodes. Pure arithmetic.

A collective is bound by the link that has to carry most for its rate: what a GPU gets over NVLink, or what a node
gets through its adapters. All groups of a layer run at the same time, so a node's adapters are shared by the groups
that its GPUs belong to.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Rates that a collective reaches, in bytes a second and each way: already times their efficiency.

    Attributes
    ----------
    gpu:
        A GPU to the others of its node.
    node:
        A node to others: all of its adapters together.
    gpus_per_node:
        GPUs of a node.
    hop_s:
        Latency of a step between nodes.
    local_hop_s:
        Latency of a step within a node.
    measured:
        Seconds of a kind of collective, from measured times; None where its kind was not measured.
    """

    gpu: float
    node: float
    gpus_per_node: int
    hop_s: float
    local_hop_s: float
    measured: Callable[[str, float, RankGroup], float | None] | None = None


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Ranks of a collective and how they lie on nodes.

    Attributes
    ----------
    size:
        Ranks.
    per_node:
        Ranks of the group on one node.
    """

    size: int
    per_node: int

    @property
    def nodes(self) -> int:
        """Return the number of nodes that the group spans."""
        return -(-self.size // self.per_node)

    @classmethod
    def inner(cls, size: int, gpus_per_node: int) -> RankGroup:
        """Return a group of neighbouring ranks: the innermost dimension of a mesh."""
        return cls(size, min(size, gpus_per_node))

    @classmethod
    def outer(cls, size: int, inner: int, gpus_per_node: int) -> RankGroup:
        """Return a group of every ``inner``-th rank: a dimension outside of one with ``inner`` ranks."""
        return cls(size, max(1, min(size, gpus_per_node // inner)))


def all_gather(total_bytes: float, group: RankGroup, links: Links) -> float:
    """Return the seconds of an all-gather of ``total_bytes``, of which every rank has a part.

    A reduce-scatter takes as long.

    A rank receives ``total (n - 1) / n`` over NVLink; a node receives what its ranks of the group lack,
    ``total (nodes - 1) / nodes``, once for each of the groups on it (``gpus / per_node``).
    """
    if group.size <= 1:
        return 0.0
    if links.measured is not None and (found := links.measured("all_gather", total_bytes, group)) is not None:
        return found
    local = total_bytes * (group.size - 1) / group.size / links.gpu if group.per_node > 1 else 0.0
    groups_on_node = links.gpus_per_node / group.per_node
    far = total_bytes * (group.nodes - 1) / group.nodes * groups_on_node / links.node
    return max(local, far) + _latency(group, links)


def all_reduce(total_bytes: float, group: RankGroup, links: Links) -> float:
    """Return the seconds of an all-reduce, as a reduce-scatter and an all-gather.

    For few bytes within a node one shot is used: every rank reads the values of all others. A ring waits for every rank
    in turn, and for the few kilobytes of a decode step this waiting is the whole duration. Engines have custom kernels
    for that (vLLM's and SGLang's custom all-reduce): ``total (n - 1)`` over a GPU's NVLink, and two hops, because ranks
    wait for each other before and after.
    """
    if group.size > 1 and links.measured is not None:
        found = links.measured("all_reduce", total_bytes, group)
        if found is not None:
            return found
    ring = 2.0 * all_gather(total_bytes, group, links)
    if group.size <= 1 or group.nodes > 1:
        return ring
    return min(ring, total_bytes * (group.size - 1) / links.gpu + 2.0 * links.local_hop_s)


def all_to_all(sent_bytes: float, group: RankGroup, links: Links) -> float:
    """Return the seconds in which every rank sends ``sent_bytes``, spread evenly over the group, itself included."""
    if group.size <= 1:
        return 0.0
    if links.measured is not None and (found := links.measured("all_to_all", sent_bytes, group)) is not None:
        return found
    local = sent_bytes * (group.per_node - 1) / group.size / links.gpu
    far = sent_bytes * (group.size - group.per_node) / group.size * links.gpus_per_node / links.node
    # messages are sent in parallel: one hop, not one for each rank
    hop = links.hop_s if group.nodes > 1 else links.local_hop_s
    return max(local, far) + hop


def bytes_s(kind: str, size: float, group: RankGroup, links: Links) -> float:
    """Return the seconds of a collective by its kind.

    A reduce-scatter takes as long as a gather, and a dispatch is an all-to-all.
    """
    match kind:
        case "all_reduce":
            return all_reduce(size, group, links)
        case "all_to_all" | "low_latency":
            return all_to_all(size, group, links)
        case _:
            return all_gather(size, group, links)


def _latency(group: RankGroup, links: Links) -> float:
    """Return the latency in seconds, of rings within a node and of trees between nodes."""
    far = math.ceil(math.log2(group.nodes)) * links.hop_s if group.nodes > 1 else 0.0
    return far + (group.per_node - 1) * links.local_hop_s
