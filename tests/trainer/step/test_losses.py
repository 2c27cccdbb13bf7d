"""Each loss against a slow reference in plain Python, gradients by finite differences."""

import math
import random

import pytest
import torch
from losses_lab import loss_config

from hpcrl.trainer.step.losses import MAX_LOG_RATIO, TrainedTokens, make_loss, policy_loss
from hpcrl.trainer.step.metrics import TokenSums

KINDS = ("masked_ratio", "icepop", "tis", "ppo_clip", "cispo", "gspo")
TOTAL = 37


def reference(config, logprobs, frozen, batch):
    """Loss sum and flags by loops. ``frozen`` are the log-probabilities wherever a gradient is stopped."""
    engine, advantages, sequences = batch
    low, high = 1 - getattr(config, "clip_low", 0), 1 + getattr(config, "clip_high", 0)
    total, flags = 0.0, []
    for t, (lp, fixed, mu, a) in enumerate(zip(logprobs, frozen, engine, advantages, strict=True)):
        ratio, weight = math.exp(min(lp - mu, MAX_LOG_RATIO)), math.exp(fixed - mu)
        if config.kind == "masked_ratio":
            moved = math.exp(fixed) - math.exp(mu)
            flag = (a > 0 and moved > config.mask_high) or (a < 0 and moved < -config.mask_low)
            term = config.kl_tau * (lp - mu) ** 2 - (0 if flag else ratio * a)
        elif config.kind == "icepop":
            flag = not config.ratio_low <= weight <= config.ratio_high
            term = -(0 if flag else weight) * math.exp(lp - fixed) * a
        elif config.kind == "tis":
            flag = weight > config.ratio_high
            term = -min(weight, config.ratio_high) * math.exp(lp - fixed) * a
        elif config.kind == "cispo":
            flag = not low <= weight <= high
            term = -min(max(weight, low), high) * a * lp
        else:
            if config.kind == "gspo":
                mates = [i for i, s in enumerate(sequences) if s == sequences[t]]
                ratio = math.exp(min(sum(logprobs[i] - engine[i] for i in mates) / len(mates), MAX_LOG_RATIO))
                weight = math.exp(sum(frozen[i] - engine[i] for i in mates) / len(mates))
            flag = (a > 0 and weight > high) or (a < 0 and weight < low)
            term = -min(ratio * a, min(max(ratio, low), high) * a)
        total += term
        flags.append(flag)
    return total / TOTAL, flags


def random_tokens(seed):
    rng = random.Random(seed)
    engine = [math.log(rng.uniform(0.02, 0.98)) for _ in range(30)]
    # rollouts drift as a whole, too, so that gspo clips some
    logprobs = [min(mu + rng.gauss((i // 7 - 2) * 0.3, 0.8), -0.001) for i, mu in enumerate(engine)]
    # a rollout has one advantage for all its tokens, or not; zero is among them
    advantages = [rng.choice([-1.5, -0.3, 0.0, 0.7, 2.0]) for _ in range(30)]
    sequences = [i // 7 for i in range(30)]
    return logprobs, engine, advantages, sequences


def run(config, logprobs, engine, advantages, sequences, *, total=TOTAL, dtype=torch.float64):
    leaf = torch.tensor(logprobs, dtype=dtype, requires_grad=True)
    tokens = TrainedTokens(
        leaf,
        torch.tensor(engine, dtype=dtype),
        torch.tensor(advantages, dtype=dtype),
        torch.tensor(sequences, dtype=torch.int64),
        max(sequences, default=0) + 1,
    )
    loss = policy_loss(tokens, make_loss(config), total_tokens=total)
    (gradient,) = torch.autograd.grad(loss.loss, leaf)
    return loss, gradient


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_equals_the_reference(kind, seed):
    # no two bounds are the same: one in place of another is seen
    bounds = {
        "mask_low": 0.1,
        "mask_high": 0.3,
        "ratio_low": 0.4,
        "ratio_high": 2.0,
        "clip_low": 0.15,
        "clip_high": 0.35,
    }
    config = loss_config(kind, kl_tau=0.02, **bounds)
    logprobs, engine, advantages, sequences = random_tokens(seed)
    loss, gradient = run(config, logprobs, engine, advantages, sequences)
    expected, flags = reference(config, logprobs, logprobs, (engine, advantages, sequences))
    assert loss.loss.item() == pytest.approx(expected, rel=1e-12)
    assert loss.masked.tolist() == flags
    assert any(flags)
    assert not all(flags)
    assert loss.log_ratio.tolist() == pytest.approx([a - b for a, b in zip(logprobs, engine, strict=True)])
    assert not loss.log_ratio.requires_grad
    for i in range(len(logprobs)):
        sides = []
        for nudge in (1e-6, -1e-6):
            moved = [lp + nudge * (i == j) for j, lp in enumerate(logprobs)]
            sides.append(reference(config, moved, logprobs, (engine, advantages, sequences))[0])
        assert gradient[i].item() == pytest.approx((sides[0] - sides[1]) / 2e-6, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_no_tokens(kind):
    loss, gradient = run(loss_config(kind), [], [], [], [])
    assert loss.loss.item() == 0.0
    assert gradient.shape == loss.masked.shape == (0,)


@pytest.mark.parametrize("kind", KINDS)
def test_sum_over_parts_is_the_whole(kind):
    config = loss_config(kind)
    logprobs, engine, advantages, sequences = random_tokens(5)
    whole, gradient = run(config, logprobs, engine, advantages, sequences)
    # cut between rollouts, as micro-batches are; later parts number their rollouts from 0
    parts = [
        run(config, logprobs[a:b], engine[a:b], advantages[a:b], [s - a // 7 for s in sequences[a:b]])
        for a, b in ((0, 14), (14, 21), (21, 30))
    ]
    assert sum(part.loss.item() for part, _ in parts) == pytest.approx(whole.loss.item(), rel=1e-12)
    assert torch.allclose(torch.cat([g for _, g in parts]), gradient, rtol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_on_policy_every_loss_is_the_policy_gradient(kind):
    """With trainer and engine equal, the gradient of each token is ``-A / total`` (gspo: its rollout's mean)."""
    _, engine, _, sequences = random_tokens(1)
    advantages = [1.5 if s % 2 else -0.5 for s in sequences]
    loss, gradient = run(loss_config(kind), engine, engine, advantages, sequences)
    assert gradient.tolist() == pytest.approx([-a / TOTAL for a in advantages])
    assert not loss.masked.any()


# (kind, engine probability, trainer probability, advantage, masked)
EDGES = [
    ("masked_ratio", 0.5, 0.6999, 1.0, False),
    ("masked_ratio", 0.5, 0.7001, 1.0, True),
    ("masked_ratio", 0.5, 0.7001, -1.0, False),
    ("masked_ratio", 0.5, 0.3001, -1.0, False),
    ("masked_ratio", 0.5, 0.2999, -1.0, True),
    ("masked_ratio", 0.5, 0.2999, 1.0, False),
    ("masked_ratio", 0.5, 0.95, 0.0, False),
    ("icepop", 0.1, 0.4999, 1.0, False),
    ("icepop", 0.1, 0.5001, 1.0, True),
    ("icepop", 0.1, 0.0501, 1.0, False),
    ("icepop", 0.1, 0.0499, -1.0, True),
    ("tis", 0.1, 0.4999, 1.0, False),
    ("tis", 0.1, 0.5001, 1.0, True),
    ("tis", 0.1, 0.0001, 1.0, False),
    ("ppo_clip", 0.5, 0.6399, 1.0, False),
    ("ppo_clip", 0.5, 0.6401, 1.0, True),
    ("ppo_clip", 0.5, 0.6401, -1.0, False),
    ("ppo_clip", 0.5, 0.4001, -1.0, False),
    ("ppo_clip", 0.5, 0.3999, -1.0, True),
    ("ppo_clip", 0.5, 0.3999, 1.0, False),
    ("cispo", 0.5, 0.6401, -1.0, True),
    ("cispo", 0.5, 0.3999, 1.0, True),
    ("cispo", 0.5, 0.5, 1.0, False),
    ("gspo", 0.5, 0.6401, 1.0, True),
    ("gspo", 0.5, 0.6399, 1.0, False),
]


@pytest.mark.parametrize(("kind", "engine", "trainer", "advantage", "masked"), EDGES)
def test_edges(kind, engine, trainer, advantage, masked):
    config = loss_config(kind, kl_tau=0.0)
    loss, gradient = run(config, [math.log(trainer)], [math.log(engine)], [advantage], [0], total=1)
    assert loss.masked.tolist() == [masked]
    if kind in ("tis", "cispo"):
        assert gradient.item() != 0.0  # cut, not dropped
    else:
        assert (gradient.item() == 0.0) == (masked or advantage == 0.0)


def test_masked_tokens_are_still_pulled_back():
    loss, gradient = run(loss_config(kl_tau=0.1), [math.log(0.9)], [math.log(0.5)], [1.0], [0], total=1)
    assert loss.masked.item()
    assert gradient.item() == pytest.approx(0.1 * 2 * math.log(0.9 / 0.5))


def test_total_must_be_positive():
    with pytest.raises(ValueError, match="total_tokens"):
        run(loss_config(), [-1.0], [-1.0], [1.0], [0], total=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("log_ratio", [-200.0, -89.0, -30.0, 19.0, 30.0, 89.0, 200.0])
def test_extreme_ratios_give_numbers(kind, advantage, log_ratio):
    """In float32, as it is trained, where ``e^89`` is infinite: value and gradient are those of the formula."""
    config = loss_config(kind)
    logprobs, engine = ([-0.5], [-0.5 - log_ratio]) if log_ratio > 0 else ([-0.5 + log_ratio], [-0.5])
    loss, gradient = run(config, logprobs, engine, [advantage], [0], dtype=torch.float32)
    batch = (engine, [advantage], [0])
    expected, _ = reference(config, logprobs, logprobs, batch)
    sides = [reference(config, [logprobs[0] + nudge], logprobs, batch)[0] for nudge in (1e-2, -1e-2)]
    assert loss.loss.item() == pytest.approx(expected, rel=1e-5)
    assert gradient.item() == pytest.approx((sides[0] - sides[1]) / 2e-2, rel=1e-4, abs=1e-6)
    if log_ratio > MAX_LOG_RATIO:
        assert loss.masked.item()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("log_ratio", [-200.0, 200.0])
def test_an_extreme_token_leaves_the_others_alone(kind, log_ratio):
    config = loss_config(kind)
    logprobs, engine, advantages, sequences = random_tokens(3)
    _, alone = run(config, logprobs, engine, advantages, sequences, dtype=torch.float32)
    extreme = ([-0.5], [-0.5 - log_ratio]) if log_ratio > 0 else ([-0.5 + log_ratio], [-0.5])
    for advantage in (-1.0, 0.0, 1.0):
        loss, gradient = run(
            config,
            logprobs + extreme[0],
            engine + extreme[1],
            [*advantages, advantage],
            [*sequences, 1 + max(sequences)],
            dtype=torch.float32,
        )
        assert gradient.isfinite().all()
        assert loss.loss.isfinite()
        assert torch.equal(gradient[:-1], alone)


def test_measurements_of_extreme_ratios_are_numbers():
    """vLLM says -9999 for a log-probability of minus infinity."""
    loss, _ = run(loss_config(), [-0.5, -0.5], [-9999.0, -0.5], [1.0, 1.0], [0, 0], dtype=torch.float32)
    sums = TokenSums(3)
    sums.add(loss, torch.zeros(2), torch.tensor([3, 3]), torch.tensor([3, 3]))
    assert sums._scalars.isfinite().all()
