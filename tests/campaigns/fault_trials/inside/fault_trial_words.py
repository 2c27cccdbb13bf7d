"""The environment ``words`` as one of one's own, which does something wrong for as long as it is told to."""

from __future__ import annotations

import os
import random
from typing import Any

from fault_trial_orders import Orders

from hpcrl.config.environments import WordsEnv
from hpcrl.rollouts.environments import Outcome, Policy, Prompt
from hpcrl.rollouts.environments.words import WordsEnvironment

_REWARDS: dict[str, Any] = {
    "NaN": float("nan"),
    "infinity": float("inf"),
    "minus infinity": float("-inf"),
    "text": "0.5",
    "nothing": None,
    "a huge number": 1e300,
}


class Words(WordsEnvironment):
    """Words in reverse."""

    def __init__(self) -> None:
        super().__init__(WordsEnv(name="reverse", kind="words", task="reverse"))
        self._orders, self._random = Orders(), random.Random()

    async def rollout(self, prompt: Prompt, policy: Policy) -> Outcome:
        outcome = await super().rollout(prompt, policy)
        order = self._orders.now("environment")
        if not order or self._random.random() >= order["share"]:
            return outcome
        what = order["what"]
        if what == "raises":
            raise KeyError("stdout")
        if what == "exits":
            self._orders.followed()
            os._exit(7)
        if what == "NaN part":
            return Outcome(outcome.reward, {**outcome.parts, "letters": float("nan")})
        return Outcome(_REWARDS[what], outcome.parts)
