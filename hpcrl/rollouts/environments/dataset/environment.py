"""Environment ``dataset``: one question of a file, one reply, a reward of named checkers."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hpcrl.config.environments import DatasetEnv
from hpcrl.config.rewards import ToolCallReward
from hpcrl.rollouts.environments.base import Message, Outcome, Policy, Prompt, Reply, Split, ToolCall
from hpcrl.rollouts.environments.dataset.task_file import TaskFile
from hpcrl.rollouts.environments.dataset.tasks import Task
from hpcrl.rollouts.environments.rewards.tool_calls import read_calls

_MAX_DRAWS = 1000
"""Maximum number of questions that are drawn to find one with another answer."""


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
        self._judges_calls = any(isinstance(reward, ToolCallReward) for reward in config.rewards)

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
            The rows have no answer, or all the same one, or tools: `hpcrl sft` reads conversations with calls.
        """
        if prompt.tools:
            raise NotImplementedError("demonstrations have no tools")
        said = prompt.data.demonstration
        if not said:
            raise NotImplementedError("rows have no answer, and there is no demonstration")
        if not correct:
            said = self._wrong(prompt.data, rng)
        return (*prompt.messages, {"role": "assistant", "content": said})

    def _wrong(self, task: Task, rng: random.Random) -> str:
        """Return the reply to another training question; of few different answers many are right for this one, too."""
        right = {each.strip() for each in (task.demonstration, task.answer, *task.others)}
        for _ in range(_MAX_DRAWS):
            other = self._tasks.other(rng)
            if not right & {other.demonstration.strip(), other.answer.strip()}:
                return other.demonstration
        raise NotImplementedError("all rows have the same answer, so there is no wrong demonstration")

    def solution(self, prompt: Prompt) -> list[Reply] | None:
        """Return the right reply, with its calls where tools are judged; None where it is not known."""
        task = prompt.data
        if not prompt.tools:
            return [Reply(task.demonstration, finished=True)] if task.demonstration else None
        calls = read_calls(task.answer) if self._judges_calls else ""
        if isinstance(calls, str):
            return None
        said = (ToolCall(name, arguments, f"call_0_{number}") for number, (name, arguments) in enumerate(calls))
        return [Reply("", finished=True, calls=tuple(said))]

    def close(self) -> None:
        """End the processes of checkers."""
        self._judge.close()
