"""Environments of the trainer's tests: their processes import no torch."""

from __future__ import annotations

import random

from hpcrl.rollouts.environments import Message, Outcome, Policy, Prompt, Split


class ToyEnvironment:
    """Repeat a letter; a two-turn conversation."""

    name = "toy"

    def prompt(self, split: Split, index: int) -> Prompt:
        letter = "abcd"[index % 4]
        return Prompt(split, index, ({"role": "user", "content": f"say {letter}"},), letter)

    async def rollout(self, prompt: Prompt, policy: Policy) -> Outcome:
        reply = await policy.reply(prompt.messages)
        return Outcome(float(reply.text == prompt.data))

    def demonstration(self, prompt: Prompt, *, correct: bool, rng: random.Random) -> list[Message]:
        answer = prompt.data if correct else rng.choice("xyz")
        return [
            *prompt.messages,
            {"role": "assistant", "content": answer},
            {"role": "tool", "content": "ok"},
            {"role": "assistant", "content": answer * 2},
        ]


class SilentEnvironment(ToyEnvironment):
    """Has nothing to show."""

    def demonstration(self, prompt: Prompt, *, correct: bool, rng: random.Random) -> list[Message]:
        raise NotImplementedError("toy")
