"""The environment ``verifiers``: tasks, episodes and rewards of the library, turns of the policy by the gateway."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from hpcrl.config.verifiers_environment import VerifiersEnv
from hpcrl.errors import ConfigError, Finding
from hpcrl.rollouts.environments.base import Message, Outcome, Policy, Prompt, Split, UnrecoverableError
from hpcrl.rollouts.environments.verifiers.worker_process import WorkerAnsweredError, WorkerLostError, WorkerProcess


class VerifiersRolloutError(Exception):
    """Raised where a rollout of verifiers failed: what it says about that."""


class _TaskMessage(msgspec.Struct, frozen=True):
    role: str
    content: str


class _Task(msgspec.Struct, frozen=True):
    messages: tuple[_TaskMessage, ...]


class _Played(msgspec.Struct, frozen=True):
    """A rollout that has ended. The numbers are checked as those of all environments are."""

    reward: Any
    parts: dict[str, Any]


class VerifiersEnvironment:
    """Rollouts of verifiers in a process of its own.

    Attributes
    ----------
    notes:
        What is odd about the environment, a sentence each.
    """

    def __init__(self, config: VerifiersEnv) -> None:
        """Start the process, and let it load the environment.

        Raises
        ------
        ConfigError
            It cannot be loaded.
        """
        self.name, self._config = config.name, config
        python = config.python or sys.executable
        environ = {name: os.environ[name] for name in config.inherit if name in os.environ}
        try:
            self._worker = WorkerProcess(
                python, {**environ, **config.environ}, answer_timeout_s=config.answer_timeout_s
            )
            # this process ends it before the one that started this one gives up
            built = self._worker.ask(self._build(), timeout_s=0.9 * config.start_timeout_s)
        except WorkerAnsweredError as error:
            self._worker.close()
            raise self._wrong(error) from error
        except (WorkerLostError, OSError) as error:
            hint = "check python; the log of the orchestrator, or of this command, has what it printed"
            key = f"environments.{config.name}.python"
            raise ConfigError([Finding("recipe", key, f"{python} does not load it: {error}", hint)]) from error
        self.notes = [note for note in built.get("notes", ()) if isinstance(note, str)]

    def _build(self) -> dict[str, Any]:
        names = (
            "package",
            "path",
            "args",
            "held_out_args",
            "held_out_share",
            "max_tasks",
            "settings",
            "agent",
            "host_commands",
            "truncated_reward",
        )
        return self._config.model_dump(mode="json", include=set(names))

    def _wrong(self, error: WorkerAnsweredError) -> ConfigError:
        """Return the error of a setting, or of what the package raised."""
        base = f"environments.{self.name}"
        if error.key:
            return ConfigError([Finding("recipe", f"{base}.{error.key}", error.what, error.hint)])
        frames = "".join(f"\n      {line}" for line in error.frames.splitlines())
        key = f"{base}.{'path' if self._config.path is not None else 'package'}"
        return ConfigError([Finding("recipe", key, f"it cannot be loaded: {error}{frames}", "check args and settings")])

    def prompt(self, split: Split, index: int) -> Prompt:
        """Return a task as messages; what the environment adds to it later is not among them.

        Raises
        ------
        UnrecoverableError
            The process of verifiers is lost (also of `rollout`).
        """
        request = {"split": split, "index": index}
        try:
            answer = self._worker.ask(request, timeout_s=self._config.answer_timeout_s)
        except WorkerLostError as error:
            raise UnrecoverableError(str(error)) from error
        task = msgspec.convert(answer, _Task)
        messages = tuple({"role": each.role, "content": each.content} for each in task.messages)
        return Prompt(split=split, index=index, messages=messages)

    async def rollout(self, prompt: Prompt, policy: Policy) -> Outcome:
        """Let verifiers play an episode.

        Raises
        ------
        VerifiersRolloutError
            It failed, took too long, or has no reward.
        """
        limit_s = self._config.time_limit_s
        try:
            async with policy.endpoint() as endpoint:
                request = {
                    "split": prompt.split,
                    "index": prompt.index,
                    "url": endpoint.url,
                    "key": endpoint.key,
                    "model": endpoint.model,
                }
                answer = await self._worker.run(request, timeout_s=limit_s)
        except TimeoutError as error:
            raise VerifiersRolloutError(f"the rollout took longer than time_limit_s, {limit_s:g} s") from error
        except WorkerAnsweredError as error:
            frames = f"\n{error.frames}" if error.kind != "RolloutFailedError" else ""
            raise VerifiersRolloutError(f"verifiers: {error.what or error.kind}{frames}") from error
        except WorkerLostError as error:
            raise UnrecoverableError(str(error)) from error
        played = msgspec.convert(answer, _Played)
        return Outcome(played.reward, played.parts)

    def demonstration(self, prompt: Prompt, *, correct: bool, rng: random.Random) -> Sequence[Message]:
        """Raise NotImplementedError: verifiers knows no right turns."""
        raise NotImplementedError("tasks of verifiers have no demonstrations")

    def close(self) -> None:
        """End the process of verifiers."""
        self._worker.close()
