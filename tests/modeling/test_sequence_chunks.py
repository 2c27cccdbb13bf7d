"""Packed sequences in chunks, beside what is cut by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from hpcrl.modeling.recurrence.sequence_chunks import sequence_chunks

CPU = torch.device("cpu")


def test_chunks_of_sequences_of_five_one_and_seven_tokens() -> None:
    """First chunks of all, the longest sequence first, then second ones; padding repeats the last token."""
    chunks = sequence_chunks((0, 5, 6, 13), 3, CPU)
    assert chunks.counts == [3, 2, 1]
    assert (chunks.order.tolist(), chunks.back.tolist()) == ([2, 0, 1], [1, 2, 0])
    assert chunks.tokens.tolist() == [[6, 7, 8], [0, 1, 2], [5, 5, 5], [9, 10, 11], [3, 4, 4], [12, 12, 12]]
    assert chunks.real.int().tolist() == [[1, 1, 1], [1, 1, 1], [1, 0, 0], [1, 1, 1], [1, 1, 0], [1, 0, 0]]
    assert chunks.places.tolist() == [3, 4, 5, 12, 13, 6, 0, 1, 2, 9, 10, 11, 15]
    assert chunks.cut(torch.arange(26).view(13, 2))[4].tolist() == [[6, 7], [8, 9], [8, 9]]


@pytest.mark.parametrize(("starts", "size", "counts"), [((0, 6), 3, [1, 1]), ((0, 4, 7), 64, [2]), ((0, 1), 1, [1])])
def test_no_chunk_is_empty(starts: tuple[int, ...], size: int, counts: list[int]) -> None:
    """Nor wider than the longest sequence."""
    chunks = sequence_chunks(starts, size, CPU)
    assert chunks.counts == counts
    assert chunks.real.any(dim=1).all()
    assert chunks.tokens.shape == (sum(counts), min(size, max(b - a for a, b in pairwise(starts))))
