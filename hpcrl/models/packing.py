"""Costs of training on rollouts, and packing of rollouts of unequal cost. The orchestrator packs by it, and the planner
predicts its result."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from functools import lru_cache, partial

from hpcrl.models.facts import ModelFacts


def training_cost(facts: ModelFacts) -> Callable[[int], float]:
    """Return a function from the tokens of a rollout to its operations, forward and backward.

    The part of matrix products is linear in the tokens; scores of attention are quadratic, in windows and in sparse
    attention linear from some length on, plus the quadratic part of an indexer.
    """
    return partial(_training_cost, facts, "mla+dsa" in facts.attention_kinds)


@lru_cache(maxsize=4096)
def _training_cost(facts: ModelFacts, absorbed: bool, length: int) -> float:
    passes = (facts.sequence_flops(length, backward=backward, absorbed=absorbed) for backward in (False, True))
    return sum(flops.total for flops in passes)


def fill_bins(
    sizes: Sequence[float], costs: Sequence[float], *, budget: float, bins: int
) -> tuple[list[float], list[list[int]]] | None:
    """Distribute items: each, in the given order, goes to the bin of the least cost that has room for its size.

    With the largest first this is the LPT rule of Graham (1969).

    Parameters
    ----------
    sizes, costs:
        Values of each item; an item that is not smaller than one before it does not cost less, and the other way round.
    budget:
        Sizes of a bin, together; a single item may be larger.

    Returns
    -------
    tuple
        The cost of each bin, and the items in it; None where some item fits into no bin. Equal input gives equal
        output.
    """
    loads, room = [0.0] * bins, [budget] * bins
    items: list[list[int]] = [[] for _ in range(bins)]
    least = min(sizes, default=0.0)
    heap = [(0.0, number) for number in range(bins)]
    for index, size in enumerate(sizes):
        full = []
        while heap and items[heap[0][1]] and size > room[heap[0][1]]:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        number = heap[0][1]
        items[number].append(index)
        room[number] -= size
        loads[number] += costs[index]
        heapq.heapreplace(heap, (loads[number], number))
        # smaller items may still fit; full bins are not considered again
        for entry in full:
            if room[entry[1]] >= least:
                heapq.heappush(heap, entry)
    return loads, items
