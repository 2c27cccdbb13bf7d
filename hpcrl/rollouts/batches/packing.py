"""Packing the rollouts of a batch into micro-batches of equal budget, and these into shards of equal length."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

__all__ = ["pack"]


def pack(lengths: Sequence[int], *, budget: int, world_size: int) -> list[list[list[int]]]:
    """Distribute rollouts over ranks and micro-batches.

    Longest first, each rollout goes to the emptiest micro-batch (the LPT rule of Graham, 1969); the number of
    micro-batches is the smallest multiple of ``world_size`` with which this keeps the budget. Micro-batches are
    then dealt out by size, so that those which ranks run at the same time, between the same collectives, are
    alike. A rollout longer than the budget has a micro-batch for itself. Equal input gives equal output.

    Parameters
    ----------
    lengths:
        Tokens of each rollout, at least 1.
    budget:
        Tokens of a micro-batch.
    world_size:
        Data-parallel ranks of the trainer.

    Returns
    -------
    list
        Indices into ``lengths`` (ascending), by rank and micro-batch: every rank has the same number of
        micro-batches, some of which may be empty; every index occurs once.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    count = max(1, -(-sum(min(length, budget) for length in lengths) // (budget * world_size))) * world_size
    while (bins := _fill(lengths, order, budget, count)) is None:
        count += world_size
    bins.sort(key=lambda indices: (-sum(lengths[i] for i in indices), indices))
    shards: list[list[list[int]]] = [[] for _ in range(world_size)]
    for row in range(0, count, world_size):
        chunk = bins[row : row + world_size]
        # alternate the direction: otherwise rank 0 had the largest of every row
        for rank, indices in enumerate(chunk if (row // world_size) % 2 == 0 else reversed(chunk)):
            shards[rank].append(indices)
    return shards


def _fill(lengths: Sequence[int], order: Sequence[int], budget: int, count: int) -> list[list[int]] | None:
    """Fill ``count`` bins, or None where the budget does not allow it."""
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, number) for number in range(count)]
    for index in order:
        load, number = heap[0]
        # what does not fit into the emptiest bin fits into none
        if load and load + lengths[index] > budget:
            return None
        heapq.heapreplace(heap, (load + lengths[index], number))
        bins[number].append(index)
    return [sorted(indices) for indices in bins]
