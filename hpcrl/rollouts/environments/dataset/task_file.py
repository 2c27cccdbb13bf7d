"""The tasks of a file, and the checkers that judge them: what environments with a file have in common."""

from __future__ import annotations

import random
from itertools import accumulate

import msgspec

from hpcrl.config.environments import TaskFileEnv
from hpcrl.errors import ConfigError
from hpcrl.rollouts.core.seeding import stable_fraction, stable_hash
from hpcrl.rollouts.environments.base import Prompt, Split
from hpcrl.rollouts.environments.dataset.partition import Partition, read_partition
from hpcrl.rollouts.environments.dataset.tasks import Task
from hpcrl.rollouts.environments.rewards.judge import Judge

_LOOKED_AT = 8
"""Answers of each difficulty that checkers look at which take too long for all of them."""


class TaskFile:
    """Tasks by split and index.

    Attributes
    ----------
    judge:
        The checkers; without any it gives 0.
    notes:
        What is odd about the files, a sentence each.
    """

    def __init__(self, config: TaskFileEnv) -> None:
        """Read the files and make the checkers.

        Raises
        ------
        ConfigError
            A row or a checker is wrong.
        """
        self.judge = Judge(config.name, config.rewards, processes=config.checker_processes)
        self._decoder = msgspec.msgpack.Decoder(Task)
        try:
            partition = read_partition(config)
            self.judge.check_answers(self._first_answers(partition))
        except ConfigError:
            self.judge.close()
            raise
        self.notes = partition.notes
        self._held_out, self._train = partition.held_out, list(partition.train.values())
        weights = config.curriculum.weights
        shares = [weights[value] for value in partition.train] if weights else [1.0]
        self._bounds = [bound / sum(shares) for bound in accumulate(shares)]

    def _first_answers(self, partition: Partition) -> list[str]:
        """Return some answers: of each difficulty, and held out."""
        lists = [*partition.train.values(), partition.held_out]
        found = [self._decoder.decode(task) for tasks in lists for task in tasks[:_LOOKED_AT]]
        return [answer for task in found for answer in (task.answer, *task.others)]

    def prompt(self, split: Split, index: int) -> Prompt:
        """Return the prompt of a task; its ``data`` is the `Task`."""
        task = self._decoder.decode(self._encoded(split, index))
        return Prompt(split=split, index=index, messages=tuple(task.messages), data=task, tools=tuple(task.tools))

    def other(self, rng: random.Random) -> Task:
        """Return some training task."""
        return self._decoder.decode(rng.choice(rng.choice(self._train)))

    def _encoded(self, split: Split, index: int) -> bytes:
        if split == "heldout":
            return self._held_out[index % len(self._held_out)]
        if len(self._train) == 1:
            return self._train[0][index % len(self._train[0])]
        # both draws are of the index alone, so that a run that resumes draws the same
        draw = stable_fraction("difficulty", index)
        group = next((i for i, bound in enumerate(self._bounds) if draw < bound), len(self._bounds) - 1)
        return self._train[group][stable_hash("row", index) % len(self._train[group])]
