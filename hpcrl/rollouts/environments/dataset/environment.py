"""Environment ``dataset``: one question of a file, one reply, a reward of named checkers."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hpcrl.config.environments import DatasetEnv
from hpcrl.rollouts.environments.base import Message, Outcome, Policy, Prompt, Split
from hpcrl.rollouts.environments.dataset.task_file import TaskFile


class DatasetEnvironment:
    """Single-turn questions.

    Attributes
    ----------
    notes:
        Warnings about the files, a sentence each.
    """

    def __init__(self, config: DatasetEnv) -> None:
        """Read the files and make the checkers.

        Raises
        ------
        ConfigError
            A row or a checker is wrong.
        """
        self.name = config.name
        self._tasks = TaskFile(config)
        self._judge, self.notes = self._tasks.judge, self._tasks.notes

    def prompt(self, split: Split, index: int) -> Prompt:
        return self._tasks.prompt(split, index)

    async def rollout(self, prompt: Prompt, policy: Policy) -> Outcome:
        reply = await policy.reply(prompt.messages)
        return await self._judge.judge(reply, prompt.data.answer, prompt.data.row, prompt.data.others)

    def demonstration(self, prompt: Prompt, *, correct: bool, rng: random.Random) -> Sequence[Message]:
        """Return a demonstration with the right reply, or with that of another training question.

        Raises
        ------
        NotImplementedError
            The rows have no answer.
        """
        said = prompt.data.demonstration
        if not said:
            raise NotImplementedError("rows have no answer, and there is no demonstration")
        if not correct:
            said = self._tasks.other(rng).demonstration
        return (*prompt.messages, {"role": "assistant", "content": said})

    def close(self) -> None:
        """End the processes of checkers."""
        self._judge.close()
