"""Tokens that travel to experts on other ranks come back as if all experts were here; ranks are threads."""

from __future__ import annotations

import pytest
import torch
from thread_ranks import ThreadRanks
from torch import Tensor

from hpcrl.modeling.layers.dispatch import AllToAllDispatcher, LocalDispatcher, fetch_sizes
from hpcrl.modeling.layers.rows import RowOrder, copy_rows, inverse, mix_rows, permute_rows

EXPERTS, TOP_K, WIDTH = 6, 2, 3


class Given:
    """Tokens of a rank, their experts and weights; the first rank has none, another one sends all to one expert."""

    def __init__(self, rank: int) -> None:
        draw = torch.Generator().manual_seed(rank)
        tokens = (0, 5, 4, 7)[rank]
        self.x = torch.randn(tokens, WIDTH, dtype=torch.float64, generator=draw, requires_grad=True)
        self.weights = torch.rand(tokens, TOP_K, dtype=torch.float64, generator=draw, requires_grad=True)
        rows = [torch.randperm(EXPERTS, generator=draw)[:TOP_K] for _ in range(tokens)]
        self.chosen = torch.stack(rows) if rows else torch.zeros(0, TOP_K, dtype=torch.int64)
        if rank == 2:
            self.chosen[:] = torch.tensor([5, 1])
        self.slopes = torch.randn(tokens, WIDTH, dtype=torch.float64, generator=draw)


def matrices() -> Tensor:
    return torch.randn(EXPERTS, WIDTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(9))


def by_hand(given: Given) -> list[Tensor]:
    """Token by token: output, and gradients of tokens and weights."""
    experts, out = matrices(), []
    for x, chosen, weights in zip(given.x, given.chosen, given.weights, strict=True):
        out.append(sum((w * (experts[int(e)] @ x).tanh() for e, w in zip(chosen, weights, strict=True)), start=0 * x))
    found = torch.stack(out) if out else given.x * 0 + given.weights.sum() * 0
    return [found, *torch.autograd.grad((found * given.slopes).sum(), [given.x, given.weights])]


def computed(dispatcher: LocalDispatcher | AllToAllDispatcher, given: Given, first: int, here: int) -> list[Tensor]:
    rows, counts, combine = dispatcher.dispatch(given.x, given.weights, given.chosen)
    assert len(counts) == here
    parts = [
        (part @ matrix.T).tanh()
        for part, matrix in zip(rows.split(counts.tolist()), matrices()[first : first + here], strict=True)
    ]
    found = combine(torch.cat(parts))
    return [found, *torch.autograd.grad((found * given.slopes).sum(), [given.x, given.weights])]


def check(found: list[Tensor], given: Given) -> None:
    for ours, theirs in zip(found, by_hand(given), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("rank", range(4))
def test_all_experts_may_be_here(rank: int) -> None:
    check(computed(LocalDispatcher(EXPERTS), Given(rank), 0, EXPERTS), Given(rank))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_experts_may_be_on_other_ranks(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = ThreadRanks(size, monkeypatch)
    here = EXPERTS // size

    def on_rank() -> tuple[int, list[Tensor]]:
        rank = torch.distributed.get_rank(ranks)  # type: ignore[arg-type]
        dispatcher = AllToAllDispatcher(EXPERTS, ranks)  # type: ignore[arg-type]
        own = computed(dispatcher, Given(rank + 1 if size < 3 else rank), rank * here, here)
        return rank, own

    for rank, found in ranks.run(on_rank):
        check(found, Given(rank + 1 if size < 3 else rank))


def test_the_same_choice_is_agreed_on_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that is computed again does not make the host wait again; another choice does."""
    ranks = ThreadRanks(2, monkeypatch)
    asked = list[int]()
    monkeypatch.setattr(
        "hpcrl.modeling.layers.dispatch.fetch_sizes", lambda sizes: (asked.append(1), fetch_sizes(sizes))[1]
    )

    def on_rank() -> None:
        rank = torch.distributed.get_rank(ranks)  # type: ignore[arg-type]
        dispatcher, given = AllToAllDispatcher(EXPERTS, ranks), Given(rank + 1)  # type: ignore[arg-type]
        for _ in range(3):
            check(computed(dispatcher, given, 3 * rank, 3), given)
        other = Given(2 - rank)
        check(computed(dispatcher, other, 3 * rank, 3), other)

    ranks.run(on_rank)
    assert len(asked) == 2 * 2


# -- rows


def test_a_permutation_is_undone() -> None:
    order = torch.tensor([2, 0, 3, 1])
    assert inverse(order).tolist() == [1, 3, 0, 2]
    x = torch.arange(4.0)[:, None].requires_grad_()
    y = permute_rows(x, order, inverse(order))
    (y[:, 0] * torch.tensor([1.0, 10, 100, 1000])).sum().backward()
    assert y[:, 0].tolist() == [2.0, 0, 3, 1]
    assert x.grad is not None
    assert x.grad[:, 0].tolist() == [10.0, 1000, 1, 100]


def test_places_without_a_row_have_no_part() -> None:
    """Three tokens of two places each; the second place of the first, and both of the last, have no row."""
    order = RowOrder.of(torch.tensor([3, 0, 2]), 3, 2)
    assert (order.by_token.tolist(), order.starts.tolist(), order.k) == ([1, 2, 0], [0, 1, 3], 2)
    x = torch.tensor([[1.0], [2], [3]], requires_grad=True)
    copies = copy_rows(x, order)
    assert copies[:, 0].tolist() == [2.0, 1, 2]
    weights = torch.tensor([[0.5, 99], [0.25, 4], [99, 99]], requires_grad=True)
    mixed = mix_rows(copies, order, weights)
    assert mixed[:, 0].tolist() == [0.5, 8.5, 0.0]
    (mixed[:, 0] * torch.tensor([1.0, 10, 100])).sum().backward()
    assert x.grad is not None
    assert weights.grad is not None
    assert x.grad[:, 0].tolist() == [0.5, 42.5, 0.0]
    assert weights.grad.tolist() == [[1.0, 0.0], [20.0, 20.0], [0.0, 0.0]]


def test_weights_that_are_not_trained_have_no_gradient() -> None:
    order = RowOrder.of(torch.tensor([1, 0]), 1, 2)
    y = torch.ones(2, 1, requires_grad=True)
    mix_rows(y, order, torch.tensor([[0.5, 0.25]])).sum().backward()
    assert y.grad is not None
    assert y.grad[:, 0].tolist() == [0.25, 0.5]
