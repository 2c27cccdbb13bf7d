"""The same rollouts on every machine: with experts and without, in groups of unequal size."""

from __future__ import annotations

import numpy as np

from hpcrl.config.recipe import Recipe
from hpcrl.dock.routes import RoutedExperts
from hpcrl.rollouts.core.records import Rollout, Turn

WORLD_SIZE = 2
STEP = 7
LENGTHS = ((5, 37, 12), (64, 3, 20, 20), (41, 18))
"""Tokens of each rollout, by group."""


def recorded_recipe() -> Recipe:
    """One whose micro-batches hold several of these rollouts, and of which the longest fills one by itself."""
    return Recipe.model_validate(
        {
            "name": "recorded",
            "model": {"path": "nowhere"},
            "environments": [{"name": "words", "kind": "words"}],
            "trainer": {"steps": 8, "micro_batch_tokens": 64},
        }
    )


def recorded_rollouts(*, experts: bool) -> list[list[Rollout]]:
    """The rollouts of each group; with ``experts`` two of three of them have rows of routed experts."""
    numbers, groups = np.random.default_rng(20261123), []
    for lengths in LENGTHS:
        groups.append([_rollout(numbers, member, length, experts) for member, length in enumerate(lengths)])
    return groups


def _rollout(numbers: np.random.Generator, member: int, tokens: int, experts: bool) -> Rollout:
    sampled = np.zeros(tokens, dtype=np.uint8)
    sampled[2:] = numbers.integers(0, 2, tokens - 2)
    sampled[-1] = 1
    rows = numbers.integers(0, 200, (tokens, 3, 2)).astype(np.uint8)
    present = numbers.integers(0, 2, tokens).astype(np.uint8)
    return Rollout(
        member=member,
        token_ids=numbers.integers(0, 50_000, tokens).astype(np.int32),
        sampled=sampled,
        logprobs=(numbers.standard_normal(tokens) * sampled).astype(np.float32),
        versions=(3 + np.cumsum(numbers.integers(0, 2, tokens)) // 20).astype(np.int32),
        reward=float(numbers.integers(0, 4)) / 3,
        parts={"length": float(tokens), "match": 0.25 * member},
        seconds=0.5 * tokens,
        ended_s=1e9 + tokens,
        turns=[Turn(2, tokens - 2, 0.0, 0.25)],
        routed_experts=RoutedExperts.of(rows, present) if experts and member % 3 != 1 else None,
    )
