"""The environment ``dataset``: one question of a file, one reply, a reward of named checkers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate

import msgspec

from hpcrl.config.environments import DatasetEnv
from hpcrl.errors import ConfigError
from hpcrl.rollouts.environments.base import Message, Outcome, Policy, Prompt, Split
from hpcrl.rollouts.environments.dataset.partition import Partition, read_partition
from hpcrl.rollouts.environments.dataset.tasks import Task
from hpcrl.rollouts.environments.rewards.judge import Judge
from hpcrl.rollouts.sampling.seeding import stable_fraction, stable_hash

__all__ = ["DatasetEnvironment"]

_LOOKED_AT = 8
"""Answers of each difficulty that checkers look at which take too long for all of them."""


class DatasetEnvironment:
    """Single-turn questions.

    Attributes
    ----------
    notes:
        What is odd about the files, a sentence each.
    """

    def __init__(self, config: DatasetEnv) -> None:
        """Read the files and make the checkers.

        Raises
        ------
        ConfigError
            A row or a checker is wrong.
        """
        self.name = config.name
        self._judge = Judge(config.name, config.rewards, processes=config.checker_processes)
        self._decoder = msgspec.msgpack.Decoder(Task)
        try:
            partition = read_partition(config)
            self._judge.check_answers(self._first_answers(partition))
        except ConfigError:
            self._judge.close()
            raise
        self.notes = partition.notes
        self._held_out, self._train = partition.held_out, list(partition.train.values())
        weights = config.curriculum.weights
        shares = [weights[value] for value in partition.train] if weights else [1.0]
        self._bounds = [bound / sum(shares) for bound in accumulate(shares)]

    def _first_answers(self, partition: Partition) -> list[str]:
        """Return some answers: of each difficulty, and held out."""
        lists = [*partition.train.values(), partition.held_out]
        return [self._decoder.decode(task).answer for tasks in lists for task in tasks[:_LOOKED_AT]]

    def prompt(self, split: Split, index: int) -> Prompt:
        task = self._decoder.decode(self._encoded(split, index))
        messages = tuple({"role": role, "content": content} for role, content in task.messages)
        return Prompt(split=split, index=index, messages=messages, data=task)

    def _encoded(self, split: Split, index: int) -> bytes:
        if split == "heldout":
            return self._held_out[index % len(self._held_out)]
        if len(self._train) == 1:
            return self._train[0][index % len(self._train[0])]
        # both draws are of the index alone, so that a run that resumes draws the same
        draw = stable_fraction("difficulty", index)
        group = next((i for i, bound in enumerate(self._bounds) if draw < bound), len(self._bounds) - 1)
        return self._train[group][stable_hash("row", index) % len(self._train[group])]

    async def rollout(self, prompt: Prompt, policy: Policy) -> Outcome:
        reply = await policy.reply(prompt.messages)
        return await self._judge.judge(reply, prompt.data.answer, prompt.data.row)

    def demonstration(self, prompt: Prompt, *, correct: bool, rng: random.Random) -> Sequence[Message]:
        """The right reply, or that of another training question."""
        said = prompt.data.demonstration
        if not said:
            raise NotImplementedError("rows have no answer, and there is no demonstration")
        if not correct:
            other = self._decoder.decode(rng.choice(rng.choice(self._train)))
            said = other.demonstration
        return (*prompt.messages, {"role": "assistant", "content": said})

    def close(self) -> None:
        """End the processes of checkers."""
        self._judge.close()
