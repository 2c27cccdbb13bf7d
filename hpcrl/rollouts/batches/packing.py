"""Packing the sequences of a batch into micro-batches of equal cost, and these into shards of equal length."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hpcrl.models.packing import fill_bins


def pack(
    lengths: Sequence[int], *, budget: int, world_size: int, cost: Callable[[int], float] = float
) -> list[list[list[int]]]:
    """Distribute sequences over ranks and micro-batches.

    Longest first, each sequence goes to the micro-batch of the least cost that has room for its tokens; the number of
    micro-batches is the smallest multiple of ``world_size`` with which this keeps the budget. Where tokens alone would
    need fewer of them, tokens alone decide: each one more is a pass through the whole model. Micro-batches are then
    distributed by cost, so that those which ranks run at the same time, between the same collectives, are alike. A
    sequence longer than the budget has a micro-batch for itself. Equal input gives equal output.

    Parameters
    ----------
    lengths:
        Tokens of each sequence, at least 1.
    budget:
        Tokens of a micro-batch.
    world_size:
        Data-parallel ranks of the trainer.
    cost:
        Returns the cost of training on a sequence from its number of tokens, with which it grows, in any unit
        (`hpcrl.models.packing.training_cost`).

    Returns
    -------
    list
        Indices into ``lengths`` (ascending), by rank and micro-batch: every rank has the same number of
        micro-batches, some of which may be empty; every index occurs once.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    sizes = [float(lengths[i]) for i in order]
    costs = [cost(lengths[i]) for i in order]
    count = max(1, -(-sum(min(length, budget) for length in lengths) // (budget * world_size))) * world_size
    while True:
        found = fill_bins(sizes, costs, budget=budget, bins=count) or fill_bins(sizes, sizes, budget=budget, bins=count)
        if found is not None:
            break
        count += world_size
    bins = [sorted(order[i] for i in items) for items in found[1]]
    bins.sort(key=lambda indices: (-sum(cost(lengths[i]) for i in indices), indices))
    shards: list[list[list[int]]] = [[] for _ in range(world_size)]
    for row in range(0, count, world_size):
        chunk = bins[row : row + world_size]
        # alternate the direction: otherwise rank 0 had the most of every row
        for rank, indices in enumerate(chunk if (row // world_size) % 2 == 0 else reversed(chunk)):
            shards[rank].append(indices)
    return shards
