"""Environment ``reasoning_gym``: a question of a procedural task, one reply, the score of the task's own scorer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from hpcrl.config.environments import ReasoningGymEnv
from hpcrl.config.rewards import GymReward
from hpcrl.errors import ConfigError, Finding
from hpcrl.rollouts.core.seeding import stable_fraction, stable_hash
from hpcrl.rollouts.environments.base import Message, Outcome, Policy, Prompt, Split
from hpcrl.rollouts.environments.rewards.gym import GYM_BLOCK, GymGenerator
from hpcrl.rollouts.environments.rewards.judge import Judge
from hpcrl.rollouts.environments.rewards.made import CheckerNotMadeError

_MAX_BLOCKS = 50
"""Maximum number of seeds that are tried for one question of a split; the task then has too few questions."""
_MAX_DRAWS = 100
"""Maximum number of questions that are drawn to find one with another answer."""
_SEEDS = 1 << 31
_SPLITS: tuple[Split, ...] = ("train", "heldout")
_ANSWER = {
    "all": "{}",
    "last_line": "{}",
    "last_number": "{}",
    "boxed": "\\boxed{{{}}}",
    "hashes": "#### {}",
    "answer_tag": "<answer>{}</answer>",
}
"""Templates of a reply from which each extraction takes the answer."""


@dataclass(frozen=True, slots=True)
class GymQuestion:
    """Question, and the parameters that generate it again."""

    text: str
    answer: Any
    row: dict[str, Any]


class ReasoningGymEnvironment:
    """Single-turn procedural tasks.

    Attributes
    ----------
    notes:
        Warnings about the tasks, a sentence each.
    """

    def __init__(self, config: ReasoningGymEnv) -> None:
        """Import the library and try the tasks.

        Raises
        ------
        ConfigError
            A task is not known, its parameters are wrong, or a split has no question.
        """
        self.name, self._config = config.name, config
        key = f"environments.{config.name}.tasks"
        try:
            self._generator = GymGenerator(config.tasks)
        except CheckerNotMadeError as error:
            raise ConfigError([Finding("recipe", key, error.what, error.hint)]) from None
        self._names = list(config.tasks)
        weights = [task.weight for task in config.tasks.values()]
        self._bounds = [bound / sum(weights) for bound in accumulate(weights)]
        for name in self._names:
            for split in _SPLITS:
                try:
                    self._question(name, split, 0)
                except ValueError as error:
                    raise ConfigError([Finding("recipe", key, str(error), "give it more questions")]) from None
        self.notes = [note for name in self._names if (note := self._malformed(name))]
        score = GymReward(
            name="score",
            tasks=config.tasks,
            extract=config.extract,
            scorer_errors=config.scorer_errors,
            timeout_s=config.timeout_s,
        )
        self._judge = Judge(config.name, [score, *config.rewards], processes=config.checker_processes)

    def _malformed(self, name: str) -> str:
        """Report that the scorer of a task raises where it should give 0."""
        if self._config.scorer_errors == "zero":
            return ""
        for answer in ("x", "[1, 2", "9" * 50):
            try:
                self._generator.score(name, 0, 0, answer)
            except Exception as error:  # noqa: BLE001 - foreign code
                return (
                    f"the scorer of {name} raises {type(error).__name__} for the answer {answer[:10]!r}: "
                    "such rollouts fail, or score 0 with scorer_errors: zero"
                )
        return ""

    def prompt(self, split: Split, index: int) -> Prompt:
        # held-out tasks are drawn in the same proportions, so that the first ones of an evaluation are representative
        draw = stable_fraction("gym task", index)
        position = next((i for i, bound in enumerate(self._bounds) if draw < bound), len(self._bounds) - 1)
        question = self._question(self._names[position], split, index)
        messages: tuple[Message, ...] = ({"role": "user", "content": question.text},)
        if self._config.system is not None:
            messages = ({"role": "system", "content": self._config.system}, *messages)
        return Prompt(split=split, index=index, messages=messages, data=question)

    def _question(self, task: str, split: Split, index: int) -> GymQuestion:
        """Draw a question of a split (ValueError where a task has none)."""
        for block in range(_MAX_BLOCKS):
            seed = stable_hash("gym", task, index, block) % _SEEDS
            for number in range(GYM_BLOCK):
                entry = self._generator.entry(task, seed, number)
                text = str(entry["question"])
                # the set is decided by the question, not by the seed: other seeds give the same question again
                held_out = stable_fraction("split", " ".join(text.split())) < self._config.held_out_share
                if held_out == (split == "heldout"):
                    return GymQuestion(text, entry.get("answer"), {"task": task, "seed": seed, "number": number})
        raise ValueError(f"{task} has no {'held-out' if split == 'heldout' else 'training'} question")

    async def rollout(self, prompt: Prompt, policy: Policy) -> Outcome:
        reply = await policy.reply(prompt.messages)
        return await self._judge.judge(reply, "", prompt.data.row)

    def demonstration(self, prompt: Prompt, *, correct: bool, rng: random.Random) -> Sequence[Message]:
        """Return a demonstration with the library's answer, or with that to another question of the same task.

        Raises
        ------
        NotImplementedError
            The library has no answers of this task, or the same one to each question.
        """
        question: GymQuestion = prompt.data
        if not question.answer:
            raise NotImplementedError(f"reasoning_gym has no answers of {question.row['task']}")
        if not correct:
            question = self._with_another_answer(question, rng)
        said = _ANSWER[self._config.extract].format(question.answer)
        return (*prompt.messages, {"role": "assistant", "content": said})

    def _with_another_answer(self, question: GymQuestion, rng: random.Random) -> GymQuestion:
        """Draw a question of the same task whose answer is not that of ``question``, too."""
        task = question.row["task"]
        for _ in range(_MAX_DRAWS):
            other = self._question(task, "train", rng.randrange(_SEEDS))
            if other.answer and str(other.answer).strip() != str(question.answer).strip():
                return other
        raise NotImplementedError(f"no other answer was found in {_MAX_DRAWS} questions of {task}")

    def close(self) -> None:
        """End the processes of scorers."""
        self._judge.close()
