"""Environment ``words``: one turn, transform an English word letter by letter.

::

    user:      reverse stone
    assistant: enots

The word list is part of hpcrl: some two thousand common words of three to nine letters. A word belongs permanently to
training or to the held-out set, by a hash of the word alone, so that no setting mixes the two.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from importlib import resources

from hpcrl.config.recipe import WordsEnv
from hpcrl.errors import ConfigError, Finding
from hpcrl.rollouts.core.seeding import stable_hash
from hpcrl.rollouts.environments.base import Message, Outcome, Policy, Prompt, Split

_HELDOUT_ONE_IN = 6
#: reward of a right answer; the rest is the share of letters in place, which guides learning
_EXACT_WEIGHT = 0.9


@cache
def word_list() -> tuple[str, ...]:
    """Return all words, sorted."""
    text = resources.files("hpcrl.rollouts.environments").joinpath("words.txt").read_text(encoding="ascii")
    return tuple(text.split())


def transform(task: str, word: str) -> str:
    """Return the right answer: ``word`` reversed, its letters sorted, or each shifted by one (``z`` becomes ``a``)."""
    if task == "reverse":
        return word[::-1]
    if task == "sort":
        return "".join(sorted(word))
    assert task == "shift", task
    return "".join(chr((ord(letter) - ord("a") + 1) % 26 + ord("a")) for letter in word)


class WordsEnvironment:
    """Single-turn tasks on real words.

    The reward is 0.9 for the right answer plus 0.1 times the share of letters in place (see ``letters``).
    """

    def __init__(self, config: WordsEnv) -> None:
        """Choose the words.

        Raises
        ------
        ConfigError
            No word has the wanted length.
        """
        self.name, self._task = config.name, config.task
        fitting = [word for word in word_list() if config.min_letters <= len(word) <= config.max_letters]
        self._words: dict[Split, list[str]] = {"train": [], "heldout": []}
        # ordered by a hash, so that the first held-out prompts do not share an initial
        for word in sorted(fitting, key=lambda word: stable_hash("order", word)):
            heldout = stable_hash("split", word) % _HELDOUT_ONE_IN == 0
            self._words["heldout" if heldout else "train"].append(word)
        if not all(self._words.values()):
            what = f"no words of {config.min_letters} to {config.max_letters} letters"
            raise ConfigError([Finding("recipe", f"environments.{config.name}", what, "choose from 3 to 9")])

    def prompt(self, split: Split, index: int) -> Prompt:
        words = self._words[split]
        word = words[index % len(words)]
        message = {"role": "user", "content": f"{self._task} {word}"}
        return Prompt(split=split, index=index, messages=(message,), data=word)

    async def rollout(self, prompt: Prompt, policy: Policy) -> Outcome:
        reply = await policy.reply(prompt.messages)
        return self.judge(prompt, reply.text)

    def judge(self, prompt: Prompt, answer: str) -> Outcome:
        """Return the outcome of an answer.

        Parts: ``exact`` is 1 for the right answer, ``letters`` the share of positions with the right letter
        (of the longer of answer and truth).
        """
        truth = transform(self._task, prompt.data)
        answer = answer.strip()
        exact = float(answer == truth)
        right = sum(a == b for a, b in zip(answer, truth, strict=False))
        letters = right / max(len(answer), len(truth))
        return Outcome(
            reward=_EXACT_WEIGHT * exact + (1.0 - _EXACT_WEIGHT) * letters,
            parts={"exact": exact, "letters": letters},
        )

    def demonstration(self, prompt: Prompt, *, correct: bool, rng: random.Random) -> Sequence[Message]:
        """Return a demonstration with the right answer or a wrong one.

        A wrong answer is mostly the unchanged word, sometimes one with a letter missing.
        """
        answer = transform(self._task, prompt.data)
        if not correct:
            answer = self._wrong_answer(prompt.data, rng)
        return (*prompt.messages, {"role": "assistant", "content": answer})

    def _wrong_answer(self, word: str, rng: random.Random) -> str:
        # Copies dominate: greedy decoding of the start model then copies, and learning shows in evaluations.
        truth = transform(self._task, word)
        if word != truth and rng.random() < 0.8:
            return word
        position = rng.randrange(len(truth))
        return truth[:position] + truth[position + 1 :]
