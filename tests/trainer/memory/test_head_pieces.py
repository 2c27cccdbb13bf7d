"""How many pieces the head is computed in: as few as fit, and one token or one column where not even these do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_head import TOKENS, VOCAB, Products, in_chunks, in_pieces, inputs, plain

from hpcrl.trainer.batch import tensors
from hpcrl.trainer.batch.tensors import token_logprobs
from hpcrl.trainer.step import head
from hpcrl.trainer.step.head import chunked_logprobs


def products(compute: Any, *arguments: Any, **settings: Any) -> int:
    with Products() as seen, torch.no_grad():
        compute(*arguments, **settings)
    return seen.count


@pytest.mark.parametrize(
    ("tokens", "bytes_", "pieces"),
    [
        # all at once
        (None, 4 * TOKENS * VOCAB, 1),
        (1000, 4 * TOKENS * VOCAB, 1),
        (TOKENS, 4 * TOKENS * VOCAB, 1),
        # one column less: 100 and 1
        (None, 4 * TOKENS * (VOCAB - 1), 2),
        # ten tokens: 10, 10 and 3; half of the vocabulary, and what is left of it
        (10, 4 * 10 * 51, 3 * 2),
        # one column of one token
        (1, 1, TOKENS * VOCAB),
        (None, 1, VOCAB),
    ],
)
def test_pieces_are_as_large_as_they_may_be(
    monkeypatch: pytest.MonkeyPatch, tokens: int | None, bytes_: int, pieces: int
) -> None:
    monkeypatch.setattr(head, "PIECE_BYTES", bytes_)
    hidden, weight, targets, _ = inputs()
    assert products(chunked_logprobs, hidden, weight, targets, temperature=1.0, tokens=tokens) == pieces


@pytest.mark.parametrize(("auto", "pieces"), [(5, 5), (TOKENS, 1), (TOKENS + 1, 1)])
def test_without_a_size_pieces_have_the_size_of_the_constant(
    monkeypatch: pytest.MonkeyPatch, auto: int, pieces: int
) -> None:
    monkeypatch.setattr(head, "AUTO_ROWS", auto)
    hidden, weight, targets, _ = inputs()
    assert products(chunked_logprobs, hidden, weight, targets, temperature=1.0, tokens=None) == pieces


@pytest.mark.parametrize("compute", [in_chunks, in_pieces])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_piece_has_one_column_at_least(monkeypatch: pytest.MonkeyPatch, compute: Any, dtype: torch.dtype) -> None:
    hidden, weight, targets, _ = inputs(dtype)
    wanted = torch.autograd.grad(plain(hidden, weight, targets, 1.0)[0].sum(), (hidden, weight))
    monkeypatch.setattr(head, "PIECE_BYTES", 1)
    monkeypatch.setitem(tensors.PIECE_BYTES, "cpu", 1)
    found = torch.autograd.grad(compute(hidden, weight, targets), (hidden, weight))
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=10 * tolerance)


def test_rows_of_logits_are_read_one_at_a_time_where_no_more_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(2))
    targets = torch.tensor([0, 6, 3, 1, 2])
    wanted = (logits / 0.7).log_softmax(1)
    monkeypatch.setitem(tensors.PIECE_BYTES, "cpu", 1)
    found, entropies = token_logprobs(logits.clone(), targets, 0.7)
    torch.testing.assert_close(found, wanted.gather(1, targets[:, None])[:, 0])
    torch.testing.assert_close(entropies, -(wanted.exp() * wanted).sum(1))


def test_a_frozen_head_or_a_frozen_model_has_no_gradient() -> None:
    """Each of the two may be trained alone: the other one has neither a gradient nor memory for it."""
    hidden, weight, targets, _ = inputs()
    for compute in (in_chunks, in_pieces):
        (wanted_hidden, wanted_weight) = torch.autograd.grad(compute(hidden, weight, targets), (hidden, weight))
        (alone,) = torch.autograd.grad(compute(hidden.detach(), weight, targets), (weight,))
        torch.testing.assert_close(alone, wanted_weight, rtol=0, atol=0)
        (alone,) = torch.autograd.grad(compute(hidden, weight.detach(), targets), (hidden,))
        torch.testing.assert_close(alone, wanted_hidden, rtol=0, atol=0)


def test_torch_has_the_operator_that_adds_products_in_float32_on_gpus() -> None:
    """No processor runs it: it is called with the sum, both factors, and the dtype of the sum, by position."""
    arguments = torch.ops.aten.addmm.dtype_out._schema.arguments
    assert [each.name for each in arguments] == ["self", "mat1", "mat2", "out_dtype", "beta", "alpha", "out"]
    assert [each.name for each in arguments if each.kwarg_only] == ["beta", "alpha", "out"]
