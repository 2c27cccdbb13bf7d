"""Which experts a router prefers, against a choice by loops."""

from __future__ import annotations

import pytest
import torch

from hpcrl.modeling.layers.moe import SigmoidRouter

EXPERTS, GROUPS, TOP_GROUPS, TOP_K = 12, 4, 2, 3


def chosen_by_hand(scores: list[float], bias: list[float]) -> set[int]:
    """The best experts of the best groups; a group counts as much as its two best experts together."""
    preferred = [score + b for score, b in zip(scores, bias, strict=True)]
    size = EXPERTS // GROUPS
    groups = [list(range(first, first + size)) for first in range(0, EXPERTS, size)]
    worth = [sum(sorted((preferred[expert] for expert in group), reverse=True)[:2]) for group in groups]
    best = sorted(range(GROUPS), key=lambda group: worth[group], reverse=True)[:TOP_GROUPS]
    eligible = [expert for group in best for expert in groups[group]]
    return set(sorted(eligible, key=lambda expert: preferred[expert], reverse=True)[:TOP_K])


@pytest.mark.parametrize("offset", [0.0, -3.0, 2.0])
def test_experts_of_closed_groups_are_never_chosen(offset: float) -> None:
    """Also where every bias is so low that an expert which counts nothing would be the best."""
    router = SigmoidRouter(8, EXPERTS, top_k=TOP_K, normalise=True, groups=GROUPS, top_groups=TOP_GROUPS, scale=1.0)
    generator = torch.Generator().manual_seed(3)
    bias = torch.randn(EXPERTS, generator=generator) * 0.3 + offset
    router.e_score_correction_bias.copy_(bias)
    scores = torch.rand(20, EXPERTS, generator=generator)
    chosen = router.prefer(scores)
    for row, experts in zip(scores.tolist(), chosen.tolist(), strict=True):
        assert set(experts) == chosen_by_hand(row, bias.tolist())
