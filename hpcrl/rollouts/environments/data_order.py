"""Prompt of the n-th group of a run, as a function of the seed, so that a resume needs one number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from hpcrl.config.recipe import Recipe
from hpcrl.rollouts.core.seeding import stable_fraction, stable_hash
from hpcrl.rollouts.environments import Environment

_PROMPT_INDICES = 1 << 31


@dataclass(frozen=True, slots=True)
class GroupTask:
    """Assignment of a group: its index, environment and prompt."""

    index: int
    environment: Environment
    prompt_index: int


class DataOrder:
    """Training prompts in order: drawn with replacement, environments by their weights."""

    def __init__(self, recipe: Recipe, environments: Sequence[Environment]) -> None:
        self._seed, self._environments = recipe.seed, environments
        weights = [config.weight for config in recipe.environments]
        total = sum(weights)
        self._by_name = {environment.name: environment for environment in environments}
        self._bounds = [bound / total for bound in accumulate(weights)]
        self._last = max((position for position, weight in enumerate(weights) if weight > 0), default=0)

    def task(self, index: int) -> GroupTask:
        """Return the task of group ``index``."""
        draw = stable_fraction("environment", self._seed, index)
        # rounding may leave the last bound below 1
        position = next((i for i, bound in enumerate(self._bounds) if draw < bound), self._last)
        prompt_index = stable_hash("prompt", self._seed, index) % _PROMPT_INDICES
        return GroupTask(index, self._environments[position], prompt_index)

    def has(self, environment: str) -> bool:
        """Return whether an environment of this name exists."""
        return environment in self._by_name

    def again(self, index: int, environment: str, prompt_index: int) -> GroupTask | None:
        """Return the task of a group that was dispatched before, perhaps under other environment weights.

        None where its environment does not exist any more.
        """
        found = self._by_name.get(environment)
        return None if found is None else GroupTask(index, found, prompt_index)

    def rollout_seed(self, index: int, member: int) -> int:
        """Return the seed of one rollout."""
        return stable_hash("rollout", self._seed, index, member)


def heldout_shares(weights: Sequence[float], prompts: int) -> list[int]:
    """Return the held-out prompts of each environment: by weight, largest remainders first, at least one each.

    The weight 0 says nothing of an environment's share: where one of them has it, all have as many prompts.
    """
    if min(weights) <= 0:
        weights = [1.0] * len(weights)
    ideal = [weight / sum(weights) * prompts for weight in weights]
    shares = [max(1, int(value)) for value in ideal]
    for i in sorted(range(len(ideal)), key=lambda i: (int(ideal[i]) - ideal[i], i)):
        if sum(shares) < prompts:
            shares[i] += 1
    return shares
