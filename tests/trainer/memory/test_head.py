"""The head in pieces: the same log-probabilities, entropies and gradients as of all logits, which never exist."""

import pytest
import torch
from losses_lab import token_loss
from torch.utils._python_dispatch import TorchDispatchMode

from hpcrl.planning.memory.settings import AUTO_CHUNK, AUTO_CHUNK_OF_ROLLOUTS, HEAD_PIECE_BYTES, LOGIT_PIECE_BYTES
from hpcrl.trainer.batch import tensors
from hpcrl.trainer.batch.tensors import token_logprobs
from hpcrl.trainer.step import head
from hpcrl.trainer.step.head import chunked_logprobs, loss_in_pieces
from hpcrl.trainer.step.losses import PolicyLoss, TrainedTokens, policy_loss

TOKENS, WIDTH, VOCAB = 23, 16, 101


def inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, WIDTH, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(VOCAB, (TOKENS,), generator=generator)
    return hidden, weight, targets, torch.randn(TOKENS, generator=generator)


def plain(hidden, weight, targets, temperature):
    return token_logprobs((hidden @ weight.T).float(), targets, temperature)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("tokens", "columns"), [(1, 1), (5, 7), (None, 40), (TOKENS, VOCAB), (1000, 1000)])
def test_as_of_all_logits(monkeypatch, tokens, columns, temperature):
    hidden, weight, targets, scale = inputs()
    monkeypatch.setattr(head, "PIECE_BYTES", 4 * columns * min(tokens or TOKENS, TOKENS))
    wanted = plain(hidden, weight, targets, temperature)
    found = chunked_logprobs(hidden, weight, targets, temperature=temperature, tokens=tokens)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=5e-5)
    assert not found[1].requires_grad
    gradients = [torch.autograd.grad((values * scale).sum(), (hidden, weight)) for values, _ in (found, wanted)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_logits_are_rounded_as_the_model_rounds_them(monkeypatch):
    """In bfloat16 an engine samples from rounded logits: log-probabilities of others would be off by percents."""
    monkeypatch.setattr(head, "PIECE_BYTES", 4 * 5 * 7)
    hidden, weight, targets, scale = inputs(torch.bfloat16)
    wanted, found = (
        plain(hidden, weight, targets, 1.0),
        chunked_logprobs(hidden, weight, targets, temperature=1.0, tokens=5),
    )
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-5, atol=1e-5)
    gradients = [torch.autograd.grad((values * scale).sum(), (hidden, weight)) for values, _ in (found, wanted)]
    for ours, theirs in zip(*gradients, strict=True):
        # a sum over pieces in float32 beside one in the order of the product
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


def test_a_large_logit_does_not_overflow():
    hidden, weight = torch.full((1, 1), 100.0), torch.tensor([[1.0], [-1.0], [0.9]])
    logprobs, entropies = chunked_logprobs(hidden, weight, torch.tensor([0]), temperature=1.0, tokens=1)
    assert logprobs.item() == pytest.approx(-4.54e-5, rel=0.2)
    assert 0 < entropies.item() < 1e-3


def test_what_is_frozen_gets_no_gradient():
    hidden, weight, targets, _ = inputs()
    for find in (in_pieces, in_chunks):
        find(hidden, weight.detach(), targets).backward()
        assert hidden.grad is not None
        hidden.grad = None


class Largest(TorchDispatchMode):
    """The largest result of any operator, in elements."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.elements = max(self.elements, out.numel())
        return out


def test_no_tensor_has_all_logits(monkeypatch):
    monkeypatch.setattr(head, "PIECE_BYTES", 4 * 5 * 20)
    hidden, weight, targets, _ = inputs()
    with Largest() as largest:
        chunked_logprobs(hidden, weight, targets, temperature=0.9, tokens=5)[0].sum().backward()
        in_pieces(hidden, weight, targets).backward()
    assert largest.elements == VOCAB * WIDTH < TOKENS * VOCAB


def test_the_planner_counts_pieces_of_the_same_size():
    assert (AUTO_CHUNK, AUTO_CHUNK_OF_ROLLOUTS, HEAD_PIECE_BYTES) == (
        head.AUTO_TOKENS,
        head.AUTO_ROWS,
        head.PIECE_BYTES,
    )
    assert LOGIT_PIECE_BYTES == {**tensors.PIECE_BYTES, "cuda": tensors._LARGE_PIECE_BYTES}


KINDS = ("masked_ratio", "icepop", "tis", "ppo_clip", "cispo")
TRAINED = TOKENS - 2  # rows behind these have no part in a loss


def losses(kind, dtype, temperature, tokens):
    """A loss in pieces and the same of all logits: loss, masked, log-ratio, entropies, and both gradients."""
    hidden, weight, targets, noise = inputs(dtype)
    targets = targets[:TRAINED]
    exact = plain(hidden.detach()[:TRAINED], weight.detach(), targets, temperature)[0]
    # so that some tokens are masked and some ratios cut
    engine, advantages = exact + 0.5 * noise[:TRAINED], noise[:TRAINED].flip(0)
    sequences = torch.arange(TRAINED) // 4

    made = token_loss(kind, mask_low=1e-4, mask_high=1e-4, ratio_high=1.2)

    def loss(logprobs, part):
        given = TrainedTokens(logprobs, engine[part], advantages[part], sequences[part], TRAINED)
        return policy_loss(given, made, total_tokens=100)

    pieces = loss_in_pieces(hidden, weight, targets, loss, temperature=temperature, tokens=tokens)
    logprobs, entropies = plain(hidden[:TRAINED], weight, targets, temperature)
    found = loss(logprobs, slice(None))
    whole = found.loss, found.masked, found.log_ratio, entropies
    assert 0 < found.masked.sum() < TRAINED
    # any factor that a loss is multiplied with
    return [(*out, *torch.autograd.grad(3.0 * out[0], (hidden, weight))) for out in (pieces, whole)]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("tokens", [1, 5, None])
@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_in_pieces_is_that_of_all_logits(kind, tokens, temperature):
    for ours, theirs in zip(*losses(kind, torch.float32, temperature, tokens), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_in_pieces_rounds_logits_as_the_model_does(monkeypatch, kind):
    monkeypatch.setattr(head, "PIECE_BYTES", 4 * 5 * 7)
    ours, theirs = losses(kind, torch.bfloat16, 1.0, 5)
    for one, other in zip(ours[:4], theirs[:4], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    for one, other in zip(ours[4:], theirs[4:], strict=True):
        assert one.dtype == torch.bfloat16
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-3)


class Products(TorchDispatchMode):
    """Counts products of matrices."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._schema.name in {"aten::mm", "aten::addmm", "aten::addmm_"}
        return func(*args, **(kwargs or {}))


def test_logits_of_a_loss_in_pieces_are_made_once():
    with Products() as seen:
        losses("icepop", torch.float32, 1.0, 7)
    # in each of three pieces logits and two gradients; twice all logits, once more with gradients
    assert seen.count == 3 * 3 + 2 + 2


def test_a_micro_batch_without_trained_tokens_has_a_gradient_of_zero():
    hidden, weight, targets, _ = inputs()
    for find in (whole, in_pieces, in_chunks):
        loss = find(hidden[:1], weight, targets[:0])
        assert loss.item() == 0.0
        for gradient in torch.autograd.grad(loss, (hidden, weight)):
            assert not gradient.any()


def whole(hidden, weight, targets):
    return head.whole_logprobs(hidden, weight, targets, temperature=1.0)[0].sum()


def in_chunks(hidden, weight, targets):
    return chunked_logprobs(hidden, weight, targets, temperature=1.0, tokens=4)[0].sum()


def in_pieces(hidden, weight, targets):
    def loss(logprobs, _):
        return PolicyLoss(logprobs.sum(), logprobs > 0, logprobs.detach())

    return loss_in_pieces(hidden, weight, targets, loss, temperature=1.0, tokens=4)[0]
