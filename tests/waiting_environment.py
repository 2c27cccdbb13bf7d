"""An environment whose rollouts take their time in its own process, for runs of which one loses processes."""

from __future__ import annotations

import asyncio

from hpcrl.config.environments import WordsEnv
from hpcrl.rollouts.environments import Outcome, Policy, Prompt
from hpcrl.rollouts.environments.words import WordsEnvironment


class Waiting(WordsEnvironment):
    """Words to be reversed, judged after ``wait_s`` seconds."""

    def __init__(self, wait_s: float) -> None:
        super().__init__(WordsEnv(name="reverse", kind="words", task="reverse"))
        self._wait_s = wait_s

    async def rollout(self, prompt: Prompt, policy: Policy) -> Outcome:
        outcome = await super().rollout(prompt, policy)
        await asyncio.sleep(self._wait_s)
        return outcome
