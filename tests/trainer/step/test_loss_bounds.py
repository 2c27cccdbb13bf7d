"""Losses at their bounds: a token that is exactly there is inside, and one behind them by a last bit is not."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from losses_lab import token_loss
from torch import Tensor

from hpcrl.config.algorithm import KlConfig
from hpcrl.trainer.step.losses import PolicyLoss, TrainedTokens, policy_loss
from hpcrl.trainer.token_loss import MAX_LOG_RATIO

#: of trainer and engine: the token has become more likely by 0.3, and less likely by 0.2
MORE, LESS = (-0.5, -0.8), (-0.9, -0.7)
WIDE = {"mask_low": 0.9, "mask_high": 0.9, "kl_tau": 1e-9, "clip_low": 0.999, "clip_high": 1e9} | {
    "ratio_low": 1e-9,
    "ratio_high": 1e9,
}


def wide(tensor: Any) -> Tensor:
    return torch.tensor(tensor, dtype=torch.float64)


def computed(kind: str, pair: tuple[float, float], advantage: float, **settings: float) -> tuple[PolicyLoss, float]:
    """The loss of one token, and its gradient."""
    loss = token_loss(kind, **{**WIDE, **settings})
    logprobs = wide([pair[0]]).requires_grad_()
    tokens = TrainedTokens(logprobs, wide([pair[1]]), wide([advantage]), torch.tensor([0]), 1)
    found = policy_loss(tokens, loss, total_tokens=1)
    (gradient,) = torch.autograd.grad(found.loss, logprobs)
    return found, float(gradient)


def ratio(pair: tuple[float, float]) -> float:
    return float((wide(pair[0]) - wide(pair[1])).exp())


def moved(pair: tuple[float, float]) -> float:
    return float(wide(pair[0]).exp() - wide(pair[1]).exp())


#: loss, pair, advantage, setting, its value where the token is exactly at the bound, and the side that is inside
CASES = [
    ("masked_ratio", MORE, 1.0, "mask_high", moved(MORE), 1),
    ("masked_ratio", LESS, -1.0, "mask_low", -moved(LESS), 1),
    ("icepop", MORE, 1.0, "ratio_high", ratio(MORE), 1),
    ("icepop", LESS, 1.0, "ratio_low", ratio(LESS), -1),
    ("tis", MORE, 1.0, "ratio_high", ratio(MORE), 1),
    ("ppo_clip", MORE, 1.0, "clip_high", ratio(MORE) - 1, 1),
    ("ppo_clip", LESS, -1.0, "clip_low", 1 - ratio(LESS), 1),
    ("cispo", MORE, 1.0, "clip_high", ratio(MORE) - 1, 1),
    ("cispo", LESS, -1.0, "clip_low", 1 - ratio(LESS), 1),
    ("gspo", MORE, 1.0, "clip_high", ratio(MORE) - 1, 1),
    ("gspo", LESS, -1.0, "clip_low", 1 - ratio(LESS), 1),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[3]}")
def test_a_token_at_the_bound_is_inside(case: tuple[str, tuple[float, float], float, str, float, int]) -> None:
    kind, pair, advantage, name, value, inside = case
    at, gradient = computed(kind, pair, advantage, **{name: value})
    assert not at.masked.any()
    assert gradient != 0.0
    behind, _ = computed(kind, pair, advantage, **{name: value * (1 - 1e-9 * inside)})
    assert behind.masked.all()
    within, _ = computed(kind, pair, advantage, **{name: value * (1 + 1e-9 * inside)})
    assert not within.masked.any()


@pytest.mark.parametrize("kind", ["masked_ratio", "ppo_clip", "gspo"])
@pytest.mark.parametrize("pair", [MORE, LESS])
def test_a_token_without_advantage_is_not_masked(kind: str, pair: tuple[float, float]) -> None:
    """It would move in neither direction, however far it has moved already."""
    found, _ = computed(kind, pair, 0.0, mask_low=1e-6, mask_high=1e-6, clip_low=1e-6, clip_high=1e-6)
    assert not found.masked.any()


@pytest.mark.parametrize("kind", ["masked_ratio", "ppo_clip", "gspo"])
def test_the_largest_ratio_is_not_cut(kind: str) -> None:
    """At the bound the gradient of the ratio is that of the exponential; behind it there is none."""
    largest = (-0.25, -0.25 - MAX_LOG_RATIO)
    at, gradient = computed(kind, largest, -1.0)
    assert not at.masked.any()
    assert gradient == pytest.approx(math.exp(MAX_LOG_RATIO), rel=1e-9)
    behind, _ = computed(kind, (-0.25, largest[1] - 1e-6), -1.0)
    assert behind.masked.all()


def test_the_weight_of_the_divergence_is_cut_behind_the_largest_ratio() -> None:
    def gradient(engine: float) -> float:
        logprobs = wide([-0.25]).requires_grad_()
        tokens = TrainedTokens(
            logprobs, wide([engine]), wide([0.0]), torch.tensor([0]), 1, reference_logprobs=wide([-1.25])
        )
        loss = token_loss("tis", ratio_high=1e9)
        found = policy_loss(tokens, loss, total_tokens=1, kl=KlConfig(coefficient=1.0))
        return float(torch.autograd.grad(found.loss, logprobs)[0])

    # of r (q - 1 - log q), with q = e ** -1: the gradient is r (q - 1 - log q) + r (1 - q) = r (-log q)
    assert gradient(-0.25 - MAX_LOG_RATIO) == pytest.approx(math.exp(MAX_LOG_RATIO), rel=1e-9)
    assert gradient(-0.25 - MAX_LOG_RATIO - 1e-6) == pytest.approx(1 - math.exp(-1.0), rel=1e-9)


@pytest.mark.parametrize("applied_to", ["loss", "reward"])
def test_a_penalty_of_zero_changes_nothing(applied_to: Any) -> None:
    tokens = TrainedTokens(wide([-1.0, -2.0]), wide([-1.5, -2.0]), wide([0.5, -0.5]), torch.tensor([0, 0]), 1)
    plain = policy_loss(tokens, token_loss(), total_tokens=3)
    tokens = tokens._replace(reference_logprobs=wide([-0.5, -1.0]))
    found = policy_loss(tokens, token_loss(), total_tokens=3, kl=KlConfig(coefficient=0.0, applied_to=applied_to))
    assert float(found.loss) == float(plain.loss)


def test_a_penalty_of_zero_needs_no_reference() -> None:
    tokens = TrainedTokens(wide([-1.0]), wide([-1.5]), wide([0.5]), torch.tensor([0]), 1)
    found = policy_loss(tokens, token_loss(), total_tokens=1, kl=KlConfig(coefficient=0.0))
    assert math.isfinite(float(found.loss))


@pytest.mark.parametrize("away", [3 * MAX_LOG_RATIO, -3 * MAX_LOG_RATIO])
def test_what_the_penalty_takes_from_an_advantage_is_bounded(away: float) -> None:
    """By its coefficient times the largest log-ratio, in both directions; the loss is that of such an advantage."""
    pair = wide([-0.5]), wide([-0.5])
    tokens = TrainedTokens(*pair, wide([2.0]), torch.tensor([0]), 1, reference_logprobs=wide([-0.5 - away]))
    found = policy_loss(tokens, token_loss("tis"), total_tokens=1, kl=KlConfig(coefficient=0.1, applied_to="reward"))
    bounded = math.copysign(MAX_LOG_RATIO, away)
    assert float(found.loss) == pytest.approx(-(2.0 - 0.1 * bounded), rel=1e-12)


def test_one_token_of_a_batch_is_enough() -> None:
    """A batch of no token has no mean."""
    tokens = TrainedTokens(wide([-1.0]), wide([-1.0]), wide([0.5]), torch.tensor([0]), 1)
    assert float(policy_loss(tokens, token_loss("tis"), total_tokens=1).loss) == pytest.approx(-0.5)
    for total in (0, -1):
        with pytest.raises(ValueError, match="must be positive"):
            policy_loss(tokens, token_loss("tis"), total_tokens=total)
