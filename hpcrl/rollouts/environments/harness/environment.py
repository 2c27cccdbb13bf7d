"""The environment ``harness``: a program for each rollout, which speaks OpenAI's API with the policy."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Sequence
from functools import partial

import msgspec

from hpcrl.config.environments import HarnessEnv
from hpcrl.rollouts.environments.base import Message, Outcome, Policy, PolicyEndpoint, Prompt, Reply, Split
from hpcrl.rollouts.environments.dataset.task_file import TaskFile
from hpcrl.rollouts.environments.dataset.tasks import Task
from hpcrl.rollouts.environments.harness.program import EndedProgram, HarnessProgramError, run_program
from hpcrl.rollouts.environments.harness.sandboxed import SandboxedPrograms
from hpcrl.storage.msgspec_types import decode_json

_SHOWN = 200
"""Maximum characters of a program's last line that a message shows."""
_TIMED_OUT = "timed_out"
"""A part of each reward: whether the program was ended at its time limit."""


class _Said(msgspec.Struct, frozen=True):
    """The last line of a program."""

    reward: float
    parts: dict[str, float] = {}


class HarnessEnvironment:
    """Tasks for programs.

    Attributes
    ----------
    notes:
        Oddities of the files, a sentence each.
    """

    def __init__(self, config: HarnessEnv) -> None:
        """Read the files and make the checkers.

        Raises
        ------
        ConfigError
            A row or a checker is wrong.
        """
        self.name, self._config = config.name, config
        self._tasks = TaskFile(config)
        self.notes = self._tasks.notes
        self._sandboxed = None if config.sandbox is None else SandboxedPrograms(config.sandbox)

    def prompt(self, split: Split, index: int) -> Prompt:
        return self._tasks.prompt(split, index)

    async def rollout(self, prompt: Prompt, policy: Policy) -> Outcome:
        """Run the program.

        Raises
        ------
        HarnessProgramError
            It failed, or returned no reward.
        """
        config = self._config
        async with policy.endpoint() as endpoint:
            run = run_program if self._sandboxed is None else partial(self._sandboxed.run, url=endpoint.url)
            ended = await run(
                config.command,
                task=self._task(prompt, policy.seed),
                environ=self._environ(endpoint),
                words={
                    "model": endpoint.model,
                    "python": sys.executable,
                    "prompt": str(prompt.messages[-1]["content"]),
                },
                time_limit_s=config.time_limit_s,
                max_bytes=config.max_output_bytes,
            )
        return await self._judged(prompt.data, ended)

    def _task(self, prompt: Prompt, seed: int) -> bytes:
        """Return the task as the program reads it: without the answer, where checkers know it."""
        task: Task = prompt.data
        hidden = self._config.columns.answer if self._config.rewards else None
        said = {
            "split": prompt.split,
            "index": prompt.index,
            "seed": seed,
            "prompt": prompt.messages[-1]["content"],
            "messages": prompt.messages,
            "row": {column: value for column, value in task.row.items() if column != hidden},
        }
        return msgspec.json.encode(said)

    def _environ(self, endpoint: PolicyEndpoint) -> dict[str, str]:
        inherited = {name: os.environ[name] for name in self._config.inherit if name in os.environ}
        if self._sandboxed is not None:
            inherited.pop("PATH", None)  # other programs are there
        own = {
            "OPENAI_BASE_URL": endpoint.url,
            # LiteLLM's name of it
            "OPENAI_API_BASE": endpoint.url,
            "OPENAI_API_KEY": endpoint.key,
            "OPENAI_MODEL": endpoint.model,
            # Anthropic's clients append /v1 themselves
            "ANTHROPIC_BASE_URL": endpoint.url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": endpoint.key,
        }
        return {**inherited, **self._config.environ, **own}

    async def _judged(self, task: Task, ended: EndedProgram) -> Outcome:
        """Return the reward: a program that was ended at its limit is judged as it stands."""
        timed_out = {_TIMED_OUT: float(ended.timed_out)}
        if self._config.rewards:
            # blanks stay: a line of a patch may be one alone
            reply = Reply(text=ended.stdout.strip("\n"), finished=not ended.timed_out)
            outcome = await self._tasks.judge.judge(reply, task.answer, task.row, task.others)
            return Outcome(outcome.reward, {**outcome.parts, **timed_out})
        last = next((line for line in reversed(ended.stdout.splitlines()) if line.strip()), "")
        try:
            said: _Said = decode_json(last, _Said)
        except msgspec.DecodeError as error:
            if ended.timed_out and self._config.time_limit_reward is not None:
                return Outcome(self._config.time_limit_reward, timed_out)
            limit = f" when it was ended after time_limit_s, {self._config.time_limit_s:g} s" if ended.timed_out else ""
            what = f"the last line of the program{limit} is not a reward: {last[:_SHOWN]!r} ({error})"
            raise HarnessProgramError(what) from error
        return Outcome(said.reward, {**said.parts, **timed_out})

    def demonstration(self, prompt: Prompt, *, correct: bool, rng: random.Random) -> Sequence[Message]:
        """Raise NotImplementedError: what a program says to the policy is not known."""
        raise NotImplementedError("the messages of a program are unknown before it runs")

    def close(self) -> None:
        """End the processes of checkers."""
        self._tasks.judge.close()

    async def aclose(self) -> None:
        """End all sandboxes and the processes of checkers."""
        self.close()
        if self._sandboxed is not None:
            await self._sandboxed.aclose()
