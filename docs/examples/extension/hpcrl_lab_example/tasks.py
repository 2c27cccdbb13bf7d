"""The environment of the kind ``count_letters``."""

import random
from collections.abc import Sequence
from typing import Any

from hpcrl.rollouts.environments import Outcome, Policy, Prompt, Split


class CountLetters:
    """How often is the first letter of a word in it? Words of an even hash are held out."""

    name = "count_letters"

    def __init__(self, letters: str, length: int) -> None:
        self._letters, self._length = letters, length

    def prompt(self, split: Split, index: int) -> Prompt:
        """Return the prompt of a number: equal in every process."""
        rng = random.Random(f"{split} {index}")
        while True:
            word = "".join(rng.choices(self._letters, k=self._length))
            if (sum(map(ord, word)) % 2 == 0) == (split == "heldout"):
                break
        answer = str(word.count(word[0]))
        return Prompt(split=split, index=index, messages=({"role": "user", "content": word},), data=answer)

    async def rollout(self, prompt: Prompt, policy: Policy) -> Outcome:
        """Ask once, and judge the answer."""
        reply = await policy.reply(prompt.messages)
        right = float(reply.text.strip() == prompt.data)
        digit = float(reply.text.strip().isdecimal())
        return Outcome(reward=0.9 * right + 0.1 * digit, parts={"right": right, "digit": digit})

    def demonstration(self, prompt: Prompt, *, correct: bool, rng: random.Random) -> Sequence[dict[str, Any]]:
        """Return a conversation with a right answer, or with a wrong one."""
        answer = prompt.data if correct else str(rng.randint(1, self._length))
        return (*prompt.messages, {"role": "assistant", "content": answer})
