"""Advantages by a teacher, in the losses of a policy: the policy comes near to it from its own samples alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from losses_lab import token_loss

from hpcrl.dock.assemble import _teacher_logprobs, _token_advantages
from hpcrl.dock.ledger.entries import PayloadPlace
from hpcrl.dock.wire import Sample
from hpcrl.trainer.step.losses import TrainedTokens, policy_loss

CONTEXTS, VOCAB, TOKENS = 16, 30, 1024
KINDS: tuple[Any, ...] = ("masked_ratio", "icepop")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lag", [0, 2])
def test_the_divergence_falls(kind: Any, lag: int) -> None:
    generator = torch.Generator().manual_seed(0)
    teacher = (4.0 * torch.randn(CONTEXTS, VOCAB, generator=generator)).log_softmax(-1)
    scores = torch.randn(CONTEXTS, VOCAB, generator=generator).requires_grad_()
    optimizer = torch.optim.Adam([scores], lr=0.05)
    sample = Sample(0, 0, TOKENS, 0.0, PayloadPlace("nowhere", 0, 0, ""))
    versions, distances = [], []
    for _ in range(120):
        policy = scores.log_softmax(-1)
        versions.append(policy.detach())
        distances.append(float((policy.exp() * (policy - teacher)).sum(-1).mean().detach()))
        engine = versions[max(0, len(versions) - 1 - lag)]
        contexts = torch.randint(CONTEXTS, (TOKENS,), generator=generator)
        tokens = torch.multinomial(engine[contexts].exp(), 1, generator=generator)[:, 0]
        said, likely = engine[contexts, tokens], teacher[contexts, tokens]
        columns = {"logprobs": said.numpy(), "teacher_logprobs": likely.numpy()}
        advantages = torch.from_numpy(np.asarray(_token_advantages(sample, columns, 1.0), np.float32))
        sequences = torch.zeros(TOKENS, dtype=torch.int64)
        batch = TrainedTokens(policy[contexts, tokens], said, advantages, sequences, 1)
        optimizer.zero_grad()
        policy_loss(batch, token_loss(kind), total_tokens=TOKENS).loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert distances[-1] < 0.1 * distances[0]


@pytest.mark.parametrize("kind", ["masked_ratio", "icepop", "gspo", "tis", "cispo"])
def test_the_expected_gradient_on_policy_is_that_of_the_divergence(kind: Any) -> None:
    """A policy of two tokens: each is sampled as often as it is likely, so that the mean is the expectation."""
    teacher = torch.tensor([0.9, 0.1]).log()
    scores = torch.tensor([1.0, 3.0]).log().requires_grad_()
    tokens = torch.tensor([0, 1, 1, 1])
    policy = scores.log_softmax(-1)
    (wanted,) = torch.autograd.grad((policy.exp() * (policy - teacher)).sum(), scores)
    policy = scores.log_softmax(-1)
    said = policy.detach()[tokens]
    columns = {"logprobs": said.numpy(), "teacher_logprobs": teacher[tokens].numpy()}
    sample = Sample(0, 0, 4, 0.0, PayloadPlace("nowhere", 0, 0, ""))
    advantages = torch.from_numpy(np.asarray(_token_advantages(sample, columns, 1.0), np.float32))
    # rollouts of one token: a loss with the ratio of a whole rollout has that of the token
    batch = TrainedTokens(policy[tokens], said, advantages, torch.arange(4), 4)
    (found,) = torch.autograd.grad(policy_loss(batch, token_loss(kind), total_tokens=4).loss, scores)
    torch.testing.assert_close(found, wanted)
    # the policy wants more of the token that the teacher finds likelier
    assert found[0] < 0 < found[1]


def test_a_rollout_without_scores_has_the_advantage_of_its_reward() -> None:
    sample = Sample(0, 0, 2, 0.75, PayloadPlace("nowhere", 0, 0, ""))
    columns = {"logprobs": np.array([0.0, -1.0], np.float32)}
    assert _token_advantages(sample, columns, 1.0) == 0.75
    columns["teacher_logprobs"] = np.array([0.0, -60.0], np.float32)
    assert _token_advantages(sample, columns, 0.0) == 0.75
    # a token that the teacher all but excludes is bounded
    assert _token_advantages(sample, columns, 0.5).tolist() == [0.75, 0.75 - 10.0]


def test_scores_are_joined_with_those_that_are_not_there() -> None:
    scored = {"token_ids": np.zeros(2, np.int32), "teacher_logprobs": np.array([-1.0, -2.0], np.float32)}
    unscored = {"token_ids": np.zeros(3, np.int32)}
    joined = _teacher_logprobs([scored, unscored])
    assert joined is not None
    np.testing.assert_array_equal(joined, np.array([-1, -2, np.nan, np.nan, np.nan], np.float32))
    assert _teacher_logprobs([unscored]) is None
