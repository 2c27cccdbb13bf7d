"""The protocol of an environment: prompts, a conversation with the policy, a reward with named parts."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

__all__ = [
    "CallStatus",
    "Environment",
    "Message",
    "Outcome",
    "Policy",
    "Prompt",
    "RemotePrompts",
    "Reply",
    "Split",
    "Tool",
    "ToolCall",
    "malformed_answer",
    "prompt_of",
    "tool_message",
]

Message = Mapping[str, Any]
"""``{"role": "system" | "user" | "assistant" | "tool", "content": text}``, and what else the chat template reads.

The result of a tool has ``tool_call_id`` and ``name`` of the call; ``tool_message`` makes one.
"""

Tool = Mapping[str, Any]
"""A tool as OpenAI's API has it: ``{"type": "function", "function": {"name": …, "description": …, "parameters": …}}``,
the last one a JSON schema."""

CallStatus = Literal["ok", "invalid_json", "unclosed_block", "missing_name", "malformed_structure", "unknown_tool"]
"""What came of a tool call: ``ok``, or what is wrong with what the policy wrote."""

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
    tools:
        What the policy may call.
    """

    split: Split
    index: int
    messages: tuple[Message, ...]
    data: Any = None
    tools: tuple[Tool, ...] = ()


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
class ToolCall:
    """A tool call of the policy, or its attempt at one.

    Attributes
    ----------
    name, arguments:
        Of the tool; empty where they cannot be read.
    id:
        For the message with the result.
    status:
        Use a call where it is ``ok`` alone; `malformed_answer` makes what to say to others.
    raw:
        As it was sampled, at most 4,096 characters.
    span:
        Its tokens, ``[begin, end)`` of the turn; None where the format does not tell.
    error:
        What is wrong, where ``status`` does not say all.
    """

    name: str
    arguments: Mapping[str, Any]
    id: str
    status: CallStatus = "ok"
    raw: str = ""
    span: tuple[int, int] | None = None
    error: str = ""


def tool_message(call: ToolCall, content: str) -> Message:
    """Return the message with the result of a call."""
    return {"role": "tool", "tool_call_id": call.id, "name": call.name or "unknown", "content": content}


_WRONG: Mapping[CallStatus, str] = {
    "invalid_json": "its arguments are no valid JSON",
    "unclosed_block": "it has no end",
    "missing_name": "it names no tool",
    "malformed_structure": "it is not in the format of tool calls",
    "unknown_tool": "there is no tool of that name",
}


def malformed_answer(call: ToolCall) -> Message:
    """Return what to say to a policy whose call is not ``ok``: what is wrong with it."""
    more = f" ({call.error})" if call.error else ""
    return tool_message(call, f"error: the tool call was not run: {_WRONG[call.status]}{more}")


@dataclass(frozen=True, slots=True)
class Reply:
    """What the policy said in one turn.

    Attributes
    ----------
    text:
        Without special tokens, thinking and tool calls.
    finished:
        False where it was cut at the token limit or the context length; the rollout cannot go on then.
    thinking:
        Where the model's format has it.
    calls:
        Tool calls, malformed ones included, where the model's format has them.
    tokens:
        How many tokens were sampled, the end of the turn included; None where nobody counted them.
    """

    text: str
    finished: bool
    thinking: str = ""
    calls: tuple[ToolCall, ...] = ()
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
