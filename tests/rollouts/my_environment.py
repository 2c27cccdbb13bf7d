"""An environment of one's own, for the tests of ``custom``."""

from __future__ import annotations

from hpcrl.rollouts.environments import Outcome, Policy, Prompt, Split


class Echo:
    """Says ``word`` and wants it back."""

    name = "whatever it calls itself"

    def __init__(self, word: str) -> None:
        self.word = word

    def prompt(self, split: Split, index: int) -> Prompt:
        return Prompt(split=split, index=index, messages=({"role": "user", "content": self.word},))

    async def rollout(self, prompt: Prompt, policy: Policy) -> Outcome:
        reply = await policy.reply(prompt.messages)
        return Outcome(reward=float(reply.text == self.word))

    def demonstration(self, prompt: Prompt, *, correct: bool, rng: object) -> list[dict[str, str]]:
        raise NotImplementedError


class NotOne:
    """Lacks everything."""


NUMBER = 7
