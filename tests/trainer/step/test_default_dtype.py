"""Numbers do not depend on torch's default dtype, which a user's own code may set to that of its model."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from hpcrl.trainer.batch import tensors
from hpcrl.trainer.batch.tensors import token_logprobs
from hpcrl.trainer.step import head
from hpcrl.trainer.step.head import chunked_logprobs, loss_in_pieces, whole_logprobs
from hpcrl.trainer.step.losses import PolicyLoss, supervised_loss
from hpcrl.trainer.step.newton_schulz import orthogonalise
from hpcrl.trainer.step.optim import clip_gradients

TOKENS, WIDTH, VOCAB = 11, 8, 37
Results = tuple[Tensor, ...]


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32).to(dtype)


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    targets = torch.randint(VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(3))
    return drawn(0, TOKENS, WIDTH, dtype=dtype).requires_grad_(), drawn(1, VOCAB, WIDTH, dtype=dtype), targets


def in_chunks(dtype: torch.dtype) -> Results:
    hidden, weight, targets = inputs(dtype)
    weight.requires_grad_()
    found = chunked_logprobs(hidden, weight, targets, temperature=0.7, tokens=4)
    return *found, *torch.autograd.grad(found[0].sum(), (hidden, weight))


def of_all(dtype: torch.dtype) -> Results:
    hidden, weight, targets = inputs(dtype)
    found = whole_logprobs(hidden, weight, targets, temperature=0.7)
    return *found, *torch.autograd.grad(found[0].sum(), (hidden,))


def of_logits(dtype: torch.dtype) -> Results:
    logits = drawn(5, TOKENS, VOCAB, dtype=dtype).requires_grad_()
    found = token_logprobs(logits, inputs(dtype)[2], 1.3)
    return *found, *torch.autograd.grad(found[0].sum(), (logits,))


def in_pieces(dtype: torch.dtype) -> Results:
    hidden, weight, targets = inputs(dtype)
    weight.requires_grad_()

    def loss(logprobs: Tensor, part: slice) -> PolicyLoss:
        return PolicyLoss(-logprobs.sum() / TOKENS, logprobs.detach() > -3.0, logprobs.detach() + 1.0)

    found = loss_in_pieces(hidden, weight, targets, loss, temperature=0.7, tokens=4)
    return *found, *torch.autograd.grad(found[0], (hidden, weight))


def supervised(dtype: torch.dtype) -> Results:
    logprobs = drawn(6, TOKENS, dtype=dtype).requires_grad_()
    found = supervised_loss(logprobs, total_tokens=5)
    return found.loss, found.masked, found.log_ratio, *torch.autograd.grad(found.loss, (logprobs,))


def orthogonal(dtype: torch.dtype) -> Results:
    return (orthogonalise(drawn(7, 2, 5, 3, dtype=torch.bfloat16)),)


def clipped(dtype: torch.dtype) -> Results:
    parameters = [torch.nn.Parameter(torch.zeros(3000, dtype=dtype)) for _ in range(2)]
    for number, parameter in enumerate(parameters):
        parameter.grad = drawn(number, 3000, dtype=dtype)
    norm = clip_gradients(parameters, 1.0, None)
    return torch.tensor(norm, dtype=torch.float64), *(each.grad for each in parameters if each.grad is not None)


@pytest.fixture(params=[torch.bfloat16, torch.float64], ids=str)
def other_default(request: pytest.FixtureRequest) -> Iterator[Callable[[], None]]:
    """Set another default dtype when it is called."""
    before = torch.get_default_dtype()
    yield lambda: torch.set_default_dtype(request.param)
    torch.set_default_dtype(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("compute", [in_chunks, of_all, of_logits, in_pieces, supervised, orthogonal, clipped])
def test_every_bit_is_the_same(
    monkeypatch: pytest.MonkeyPatch,
    other_default: Callable[[], None],
    compute: Callable[[torch.dtype], Results],
    dtype: torch.dtype,
) -> None:
    monkeypatch.setattr(head, "PIECE_BYTES", 4 * 4 * 9)
    monkeypatch.setitem(tensors.PIECE_BYTES, "cpu", 4 * VOCAB * 3)
    wanted = compute(dtype)
    other_default()
    for ours, theirs in zip(compute(dtype), wanted, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def test_a_supervised_loss_compares_with_no_other_policy() -> None:
    """No token has a ratio, and none is masked: in float32, without gradient, whatever dtype a model computes in."""
    logprobs = drawn(8, 5, dtype=torch.bfloat16).requires_grad_()
    found = supervised_loss(logprobs, total_tokens=10)
    assert (found.log_ratio.dtype, found.log_ratio.requires_grad, found.masked.dtype) == (
        torch.float32,
        False,
        torch.bool,
    )
    assert not found.masked.any()
    assert not found.log_ratio.any()
    assert found.metrics is None
