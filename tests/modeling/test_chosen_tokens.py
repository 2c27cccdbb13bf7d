"""Which tokens a query chooses, by hand: ties, scores that are no numbers, and queries that see few."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hpcrl.modeling.attention.packed import PackedAttention
from hpcrl.modeling.attention.sparse import REFERENCE, choose_tokens
from hpcrl.modeling.context import IndexQuery
from hpcrl.modeling.sparse_kernels import reference

INF, NAN, LARGEST = float("inf"), float("nan"), torch.finfo(torch.float32).max


def choose(scores: list[float], visible: list[int], top_k: int, weight: float = 1.0) -> list[list[int]]:
    """Choices of queries that all score keys so; ``scores`` are behind a relu, and times ``weight``."""
    queries = len(visible)
    return choose_tokens(
        torch.ones(queries, 1, 1),
        torch.tensor(scores)[:, None],
        torch.full((queries, 1), weight),
        torch.tensor(visible),
        top_k,
    ).tolist()


@pytest.mark.parametrize(
    ("scores", "top_k", "chosen"),
    [
        ([1, 5, 3, 4], 2, [1, 3]),
        ([1, 5, 3, 4], 3, [1, 2, 3]),
        ([1, 5, 3, 4], 4, [0, 1, 2, 3]),
        ([1, 5, 3, 4], 9, [0, 1, 2, 3]),  # as many as there are
        ([4, 4, 4, 4], 2, [0, 1]),
        ([3, 4, 3, 3], 2, [0, 1]),
        ([3, 4, 3, 4], 3, [0, 1, 3]),
        ([0, -1, 2, -3], 2, [0, 2]),  # below zero is zero
        ([1, INF, INF, 2], 1, [1]),
        # what is too large for a number is more than the largest one
        ([LARGEST, INF, 1, 1], 1, [1]),
    ],
)
def test_the_best_are_chosen_and_of_equal_ones_the_first(scores: list[float], top_k: int, chosen: list[int]) -> None:
    assert choose(scores, [4], top_k) == [chosen]


def test_the_weight_of_a_head_may_be_negative() -> None:
    assert choose([1, 5, 3, 4], [4], 2, weight=-1.0) == [[0, 2]]


def test_what_is_not_a_number_is_chosen_last() -> None:
    """Of a key that is broken: others, though all their scores are below zero, are chosen as without it."""
    assert choose([1, NAN, 3, 4], [4], 2, weight=-1.0) == [[0, 2]]
    assert choose([1, NAN, 3, 4], [4], 4, weight=-1.0) == [[0, 1, 2, 3]]
    assert choose([NAN] * 4, [4, 3], 2) == [[0, 1], [0, 1]]
    # before what is not seen, which never is
    assert choose([1, NAN, 3, 4], [2, 2], 2) == [[0, 1], [0, 1]]


@pytest.mark.parametrize(
    ("visible", "chosen"), [(1, [0, -1, -1]), (2, [0, 1, -1]), (3, [0, 1, 2]), (4, [1, 2, 3]), (5, [1, 3, 4])]
)
def test_a_query_chooses_of_what_it_sees(visible: int, chosen: list[int]) -> None:
    assert choose([1, 5, 3, 4, 9], [visible], 3) == [chosen]


@pytest.mark.parametrize("chunk_bytes", [1, 1 << 26])
def test_scores_are_sums_over_heads(chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one by one, of some queries at a time."""
    monkeypatch.setattr(reference, "_CHUNK_BYTES", chunk_bytes)
    draw = torch.Generator().manual_seed(0)
    q, k = torch.randn(9, 3, 4, generator=draw), torch.randn(11, 4, generator=draw)
    weights, visible = torch.randn(9, 3, generator=draw), torch.arange(3, 12)
    found = choose_tokens(q, k, weights, visible, 4)
    assert found.dtype == torch.int32
    for t in range(9):
        scores = [float((weights[t] * (q[t] @ k[s]).relu()).sum()) for s in range(int(visible[t]))]
        best = sorted(sorted(range(len(scores)), key=lambda s: -scores[s])[:4])
        assert found[t].tolist() == (best + [-1] * 4)[:4]


# -- of packed sequences


def index(tokens: int) -> IndexQuery:
    draw = torch.Generator().manual_seed(1)
    sizes = ((tokens, 2, 3), (tokens, 3), (tokens, 2))
    return IndexQuery(*(torch.randn(size, generator=draw) for size in sizes))


def alone(whole: IndexQuery, begin: int, end: int, top_k: int) -> Tensor:
    """What the queries of a sequence choose where there is no other one, as indices into all tokens."""
    own = IndexQuery(*(each[begin:end] for each in whole))
    found = choose_tokens(own.q, own.k, own.weights, torch.arange(1, end - begin + 1), top_k)
    return torch.where(found < 0, found, found + begin)


@pytest.mark.parametrize("own", [slice(0, 14), slice(0, 7), slice(7, 14), slice(3, 4), slice(2, 11)])
@pytest.mark.parametrize("top_k", [2, 6, 50])
def test_tokens_are_chosen_within_sequences_also_for_some_queries_alone(own: slice, top_k: int) -> None:
    starts, whole = (0, 3, 4, 14), index(14)
    packed = PackedAttention(torch.tensor(starts))
    expected = torch.full((14, min(top_k, 10)), -1, dtype=torch.int32)
    for begin, end in ((0, 3), (3, 4), (4, 14)):
        part = alone(whole, begin, end, top_k)
        expected[begin:end, : part.shape[1]] = part
    some = IndexQuery(whole.q[own], whole.k, whole.weights[own])
    found = packed.choose_for(own, some, top_k, REFERENCE)
    assert torch.equal(found, expected[own])
    if own == slice(0, 14):
        assert torch.equal(packed.choose(0, whole, top_k, REFERENCE), expected)


def test_places_in_packed_sequences() -> None:
    packed = PackedAttention(torch.tensor([0, 3, 3, 4, 6]))
    assert packed.positions.tolist() == [0, 1, 2, 0, 0, 1]
    assert packed.sequences.tolist() == [0, 0, 0, 2, 3, 3]
    assert packed.starts == (0, 3, 3, 4, 6)
    assert PackedAttention(torch.tensor([0])).positions.tolist() == []
