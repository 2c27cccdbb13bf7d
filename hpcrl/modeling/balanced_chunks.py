"""How sequences are cut so that ranks of a context-parallel group have equal shares of the causal mask.

Each sequence, whatever its length, is cut into two chunks a rank, of which rank ``r`` has the ``r``-th from its head
and the ``r``-th from its tail.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Chunks", "head_tail", "places"]


class Chunks(NamedTuple):
    """What a rank has of each sequence: tokens near its head and near its tail, as runs of flat tokens."""

    heads: list[range]
    tails: list[range]

    @property
    def tokens(self) -> list[int]:
        """Flat tokens in the order in which the rank has them: sequence by sequence."""
        return [token for head, tail in zip(self.heads, self.tails, strict=True) for token in (*head, *tail)]

    @property
    def starts(self) -> tuple[int, ...]:
        """Where each sequence begins among the rank's tokens."""
        both = (len(head) + len(tail) for head, tail in zip(self.heads, self.tails, strict=True))
        return tuple(accumulate(both, initial=0))


def head_tail(starts: tuple[int, ...], rank: int, ranks: int) -> Chunks:
    """Chunks of ``rank`` of sequences that begin at ``starts``, ``[n + 1]``; lengths need not be divisible."""

    def chunk(begin: int, end: int, number: int) -> range:
        cut = [begin + i * (end - begin) // (2 * ranks) for i in (number, number + 1)]
        return range(*cut)

    sequences = list(pairwise(starts))
    return Chunks(
        [chunk(begin, end, rank) for begin, end in sequences],
        [chunk(begin, end, 2 * ranks - 1 - rank) for begin, end in sequences],
    )


def places(chunks: Chunks, *, tails: bool) -> Tensor:
    """Where all heads, or all tails, are among the tokens of a rank: ``[heads' or tails' tokens]`` int64, ascending."""
    found: list[int] = []
    for start, head, tail in zip(chunks.starts[:-1], chunks.heads, chunks.tails, strict=True):
        middle = start + len(head)
        found += range(middle, middle + len(tail)) if tails else range(start, middle)
    return torch.tensor(found, dtype=torch.int64)
