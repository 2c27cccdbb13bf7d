"""Splits sequences so that ranks of a context-parallel group have equal shares of the causal mask.

Each sequence, whatever its length, is cut into two chunks a rank, of which rank ``r`` has the ``r``-th from its head
and the ``r``-th from its tail.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class Chunks(NamedTuple):
    """A rank's part of each sequence, as ranges of flat tokens near its head and near its tail."""

    heads: list[range]
    tails: list[range]

    @property
    def tokens(self) -> list[int]:
        """Return the flat tokens in the order in which the rank has them: sequence by sequence."""
        return [token for head, tail in zip(self.heads, self.tails, strict=True) for token in (*head, *tail)]

    @property
    def starts(self) -> tuple[int, ...]:
        """Return the start of each sequence among the rank's tokens, and the end of the last."""
        both = (len(head) + len(tail) for head, tail in zip(self.heads, self.tails, strict=True))
        return tuple(accumulate(both, initial=0))


def head_tail(starts: tuple[int, ...], rank: int, ranks: int) -> Chunks:
    """Return the chunks of ``rank`` of sequences that begin at ``starts [n + 1]``; any lengths are possible."""

    def chunk(begin: int, end: int, number: int) -> range:
        cut = [begin + i * (end - begin) // (2 * ranks) for i in (number, number + 1)]
        return range(*cut)

    sequences = list(pairwise(starts))
    return Chunks(
        [chunk(begin, end, rank) for begin, end in sequences],
        [chunk(begin, end, 2 * ranks - 1 - rank) for begin, end in sequences],
    )


def places(chunks: Chunks, *, tails: bool) -> Tensor:
    """Return the indices of all heads, or of all tails, among a rank's tokens: ``[their tokens]`` int64, ascending."""
    found: list[int] = []
    for start, head, tail in zip(chunks.starts[:-1], chunks.heads, chunks.tails, strict=True):
        middle = start + len(head)
        found += range(middle, middle + len(tail)) if tails else range(start, middle)
    return torch.tensor(found, dtype=torch.int64)
