"""Tasks of ``kind: swe`` for whole runs whose model knows nothing of them: what the policy does is scripted.

Each rollout samples one turn, so that there is something to train on, and then plays a script, which its seed chooses:
the right patch, a bribe, a fork bomb, or a disk that is filled. Sandboxes and the judge are real.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hpcrl.config.swe import SweEnv
from hpcrl.rollouts.environments.base import Message, Outcome, Policy, Prompt, Reply, Split, ToolCall
from hpcrl.rollouts.environments.swe.environment import SweEnvironment

RIGHT = 0
"""Script of the right patch; rollouts of all others get nothing."""
FORK_BOMB, FULL_DISK = 1, 2
_BRIBES = 3
"""The first of the bribes."""
_MANY = "/bin/bash -c 'bomb() { bomb | bomb & }; bomb; sleep 3' ; true"
_FILL = "for at in . /tmp /dev/shm; do dd if=/dev/zero of=$at/big bs=1M count=4096; done; echo filled"


class ScriptedSwe(SweEnvironment):
    """Tasks whose rollouts play scripts."""

    def __init__(self, tasks: str, scripts: Sequence[int] = ()) -> None:
        """Read the tasks.

        Parameters
        ----------
        scripts:
            Numbers of the scripts that are played; all by default.
        """
        config: dict[str, Any] = {"command_timeout_s": 20.0, "max_sandboxes": 4, "processes": 64}
        super().__init__(SweEnv(name="scripted", kind="swe", tasks=tasks, memory_gib=0.25, disk_gib=0.02, **config))
        self._scripts = tuple(scripts)

    def prompt(self, split: Split, index: int) -> Prompt:
        """See `hpcrl.rollouts.environments.Environment`; the model knows no tools."""
        prompt = super().prompt(split, index)
        return replace(prompt, messages=({"role": "user", "content": prompt.data.instruction},), tools=())

    async def rollout(self, prompt: Prompt, policy: Policy) -> Outcome:
        """Play a script; the part ``script`` is its number."""
        await policy.reply(prompt.messages)
        played = self._scripted(prompt)
        chosen = self._scripts or tuple(range(len(played)))
        number = chosen[policy.seed % len(chosen)]
        outcome = await super().rollout(prompt, _Scripted(played[number]))  # type: ignore[arg-type]
        return Outcome(outcome.reward, {**outcome.parts, "script": float(number)})

    def _scripted(self, prompt: Prompt) -> list[list[Reply]]:
        right = self.solution(prompt)
        assert right is not None
        bribes = list(self.tampering(prompt).values())
        assert len([right, _MANY, _FILL]) == _BRIBES
        return [right, *([_calling(command), Reply("done", finished=True)] for command in (_MANY, _FILL)), *bribes]


class _Scripted:
    """A policy that says what is written."""

    seed = 0

    def __init__(self, turns: Sequence[Reply]) -> None:
        self._turns = iter(turns)

    async def reply(self, messages: Sequence[Message], **_: Any) -> Reply:
        return next(self._turns)


def _calling(command: str) -> Reply:
    return Reply("", finished=True, calls=(ToolCall("bash", {"command": command}, "call-0"),))
