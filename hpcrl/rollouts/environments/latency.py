"""Latency: any environment, made slower on purpose, with a long tail. For measurements."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from hpcrl.config.recipe import LatencyConfig
from hpcrl.rollouts.core.seeding import stable_fraction
from hpcrl.rollouts.environments.base import Environment, Message, Outcome, Policy, Prompt, Split, prompt_of


class DelayedEnvironment:
    """Gives an environment a name and a waiting time.

    The wait comes after the conversation, where a test suite would run. Whether a rollout is one of the slow
    ones depends on its seed alone: two runs of a recipe wait equally long. Evaluations do not wait.

    Attributes
    ----------
    inner:
        The environment itself.
    """

    def __init__(self, inner: Environment, *, name: str, latency: LatencyConfig) -> None:
        self.name, self.inner, self._latency = name, inner, latency

    def wait_s(self, seed: int) -> float:
        """Return the delay of the rollout of ``seed``: 0.5 to 1.5 medians in s, times ``tail_factor`` in the tail."""
        wait = self._latency.median_s * (0.5 + stable_fraction("latency", seed))
        in_tail = stable_fraction("tail", seed) < self._latency.tail_share
        return wait * self._latency.tail_factor if in_tail else wait

    def prompt(self, split: Split, index: int) -> Prompt:
        return self.inner.prompt(split, index)

    async def fetch_prompt(self, split: Split, index: int) -> Prompt:
        """Return a prompt, as `prompt` does, from a local or remote environment."""
        return await prompt_of(self.inner, split, index)

    async def rollout(self, prompt: Prompt, policy: Policy) -> Outcome:
        outcome = await self.inner.rollout(prompt, policy)
        if prompt.split == "train":
            await asyncio.sleep(self.wait_s(policy.seed))
        return outcome

    def demonstration(self, prompt: Prompt, *, correct: bool, rng: random.Random) -> Sequence[Message]:
        return self.inner.demonstration(prompt, correct=correct, rng=rng)
