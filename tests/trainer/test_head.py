"""The head in pieces: the same log-probabilities, entropies and gradients as of all logits, which never exist."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hpcrl.planning.memory.settings import AUTO_CHUNK, HEAD_PIECE_BYTES
from hpcrl.trainer.batch.tensors import token_logprobs
from hpcrl.trainer.memory import head
from hpcrl.trainer.memory.head import chunked_logprobs

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
    chunked_logprobs(hidden, weight.detach(), targets, temperature=1.0, tokens=5)[0].sum().backward()
    assert hidden.grad is not None


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
    assert largest.elements == VOCAB * WIDTH < TOKENS * VOCAB


def test_the_planner_counts_pieces_of_the_same_size():
    assert (AUTO_CHUNK, HEAD_PIECE_BYTES) == (head.AUTO_TOKENS, head.PIECE_BYTES)
