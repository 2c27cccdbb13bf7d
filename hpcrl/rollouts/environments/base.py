"""The protocol of an environment: prompts, a conversation with the policy, a reward with named parts."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

__all__ = ["Environment", "Message", "Outcome", "Policy", "Prompt", "RemotePrompts", "Reply", "Split", "prompt_of"]

Message = Mapping[str, str]
"""``{"role": "system" | "user" | "assistant" | "tool", "content": text}``."""

Split = Literal["train", "heldout"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One task. Equal ``(split, index)`` give equal prompts in every process.

    Attributes
    ----------
    messages:
        The conversation so far, ending with a user message.
    data:
        What the environment needs to judge the answer.
    """

    split: Split
    index: int
    messages: tuple[Message, ...]
    data: Any = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a rollout.

    Attributes
    ----------
    reward:
        What the policy is trained on.
    parts:
        Named parts of it, for people; the same names for every rollout of an environment.
    """

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reply:
    """What the policy said in one turn.

    Attributes
    ----------
    text:
        Without special tokens.
    finished:
        False where it was cut at the token limit or the context length; the rollout cannot go on then.
    tokens:
        How many tokens were sampled, the end of the turn included; None where nobody counted them.
    """

    text: str
    finished: bool
    tokens: int | None = None


class Policy(Protocol):
    """The model as an environment sees it: one conversation, token ids kept out of sight.

    Attributes
    ----------
    seed:
        Number of this rollout in ``[0, 2**63)``, equal in every run of the same recipe, for environments that
        draw something.
    """

    @property
    def seed(self) -> int: ...

    async def reply(self, messages: Sequence[Message]) -> Reply:
        """Say the next turn.

        Parameters
        ----------
        messages:
            What was said since the last reply; for the first call, the whole prompt.
        """
        ...


class Environment(Protocol):
    """A source of tasks. Instances are shared by all rollouts and hold no state of any of them.

    Attributes
    ----------
    name:
        Name in metrics.
    """

    @property
    def name(self) -> str: ...

    def prompt(self, split: Split, index: int) -> Prompt:
        """Task ``index`` (0, 1, 2 … without end for ``train``). Held-out tasks never occur in training."""
        ...

    async def rollout(self, prompt: Prompt, policy: Policy) -> Outcome:
        """Talk with the policy until the task is done, and judge."""
        ...

    def demonstration(self, prompt: Prompt, *, correct: bool, rng: random.Random) -> Sequence[Message]:
        """A whole conversation for supervised warm-up: right, or wrong in a plausible way.

        Raises
        ------
        NotImplementedError
            The environment has no demonstrations.
        """
        ...


@runtime_checkable
class RemotePrompts(Protocol):
    """An environment whose prompts come from elsewhere: whoever has an event loop must wait for them."""

    async def fetch_prompt(self, split: Split, index: int) -> Prompt:
        """As `Environment.prompt`."""
        ...


async def prompt_of(environment: Environment, split: Split, index: int) -> Prompt:
    """A prompt of any environment, without holding up the event loop for one that has a process of its own."""
    if isinstance(environment, RemotePrompts):
        return await environment.fetch_prompt(split, index)
    return environment.prompt(split, index)
