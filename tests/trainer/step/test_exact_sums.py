"""Sums over a step keep what float32 would lose: a small number after a large one, and counts of many tokens."""

from __future__ import annotations

import math

import pytest
import torch

from hpcrl.trainer.batch.routed_experts import UNKNOWN_KINDS
from hpcrl.trainer.parallel.mesh import distributed
from hpcrl.trainer.step.losses import PolicyLoss
from hpcrl.trainer.step.metrics import TokenMetrics, TokenSums

#: float32 has no odd number above it
MANY = 2**24
VERSION = 7


def added(sums: TokenSums, log_ratio: float, *, entropy: float, loss: float, metric: float, lag: int = 0) -> None:
    """Add a micro-batch of one token."""
    version = torch.tensor([VERSION - lag])
    sums.add(
        PolicyLoss(
            torch.tensor(loss, dtype=torch.float64),
            torch.tensor([False]),
            torch.tensor([log_ratio], dtype=torch.float64),
            torch.tensor([[metric]], dtype=torch.float64),
        ),
        torch.tensor([entropy], dtype=torch.float64),
        version,
        version,
    )


def reduced(sums: TokenSums) -> TokenMetrics:
    with distributed(timeout_s=20) as parallel:
        return sums.reduce(parallel.world)


def k3(log_ratio: float) -> float:
    return math.exp(log_ratio) - 1 - log_ratio


def test_a_small_number_after_a_large_one_is_not_lost() -> None:
    sums = TokenSums(VERSION, longest_lag=2, loss_metrics=["own"])
    for log_ratio, value in ((9.0, 1000.0), (0.01, 1e-5)):
        added(sums, log_ratio, entropy=value, loss=value, metric=value, lag=2)
    found = reduced(sums)
    assert found.loss == pytest.approx(1000.00001, rel=1e-12)
    assert found.entropy == pytest.approx(1000.00001 / 2, rel=1e-12)
    assert found.loss_metrics == {"own": pytest.approx(1000.00001 / 2, rel=1e-12)}
    wanted = (k3(9.0) + k3(0.01)) / 2
    assert found.mismatch_kl == pytest.approx(wanted, rel=1e-13)
    assert found.mismatch_kl_by_lag == {"2": pytest.approx(wanted, rel=1e-13)}
    ratios = math.exp(9.0), math.exp(0.01)
    assert found.ess == pytest.approx(sum(ratios) ** 2 / (2 * sum(each**2 for each in ratios)), rel=1e-12)


@pytest.mark.parametrize("kind", UNKNOWN_KINDS)
def test_counts_of_many_tokens_are_exact(kind: str) -> None:
    unknown = dict.fromkeys(UNKNOWN_KINDS, 0) | {kind: MANY + 1}
    other = UNKNOWN_KINDS[0] if kind != UNKNOWN_KINDS[0] else UNKNOWN_KINDS[1]
    unknown[other] = MANY + 3
    found = reduced(TokenSums(VERSION, unknown=unknown, routes_bytes=MANY + 1, replay=True))
    assert found.routes_bytes == MANY + 1
    assert found.unknown_routing == {
        kind: pytest.approx((MANY + 1) / (2 * MANY + 4), rel=1e-15),
        other: pytest.approx((MANY + 3) / (2 * MANY + 4), rel=1e-15),
    }
    assert (found.replayed_share, found.routed_tokens) == (0.0, 0)


def test_a_step_without_replay_and_rows_has_no_shares_of_them() -> None:
    found = reduced(TokenSums(VERSION, unknown=dict.fromkeys(UNKNOWN_KINDS, 5)))
    assert (found.unknown_routing, found.replayed_share, found.routing_mismatch) == ({}, None, None)
    assert (found.unreplayed_mismatch_kl, found.replayed_mismatch_kl, found.reference_kl) == (None, None, None)
    # with replay and no token at all there is no share either
    assert reduced(TokenSums(VERSION, replay=True)).replayed_share is None


def test_means_of_a_probe_and_of_a_reference_are_over_finite_tokens() -> None:
    """The estimate of the divergence of each token, by hand."""
    sums = TokenSums(VERSION)
    ratios, unreplayed = [0.5, -0.25, math.nan, 0.1], [1.0, 0.75, 2.0, math.inf]
    loss = PolicyLoss(torch.tensor(0.0), torch.zeros(4, dtype=torch.bool), torch.tensor(ratios))
    sums.add_probe(loss, torch.tensor(unreplayed))
    sums.add_reference(torch.tensor([0.3, -math.inf, -0.6, math.nan]))
    found = reduced(sums)
    assert found.replayed_mismatch_kl == pytest.approx((k3(0.5) + k3(-0.25)) / 2, rel=1e-6)
    assert found.unreplayed_mismatch_kl == pytest.approx((k3(1.0) + k3(0.75)) / 2, rel=1e-6)
    assert found.reference_kl == pytest.approx((k3(0.3) + k3(-0.6)) / 2, rel=1e-6)


def test_ratios_beyond_all_bounds_leave_means_finite() -> None:
    """A record has no infinity: sums of squares of ratios of e ** 300 are the largest that float64 holds."""
    sums = TokenSums(VERSION)
    for log_ratio in (700.0, 1e30, -1e30):
        added(sums, log_ratio, entropy=0.0, loss=0.0, metric=math.nan)
    sums.add_reference(torch.tensor([1e30]))
    found = reduced(sums)
    assert all(math.isfinite(value) for value in (found.mismatch_kl, found.ess, found.reference_kl or 0.0))
    # two ratios of the bound and one of 0
    assert found.ess == pytest.approx(4 / (3 * 2), rel=1e-9)
    assert found.reference_kl == pytest.approx(math.exp(300.0) - 1 - 1e30, rel=1e-9)
