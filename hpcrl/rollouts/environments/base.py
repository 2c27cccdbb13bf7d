"""Protocol of an environment: prompts, a conversation with the policy, a reward with named parts."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

Message = Mapping[str, Any]
"""``{"role": "system" | "user" | "assistant" | "tool", "content": text}``, and further keys of the chat template. The
result of a tool has ``tool_call_id`` and ``name`` of the call; ``tool_message`` makes one."""

Tool = Mapping[str, Any]
"""A tool as OpenAI's API has it: ``{"type": "function", "function": {"name": …, "description": …, "parameters": …}}``,
the last one a JSON schema."""

CallStatus = Literal["ok", "invalid_json", "unclosed_block", "missing_name", "malformed_structure", "unknown_tool"]
"""Status of a tool call: ``ok``, or the kind of its error."""

Split = Literal["train", "heldout"]


class UnrecoverableError(Exception):
    """Raised where an environment cannot go on: its process ends, and another one is started."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Task of an environment. Equal ``(split, index)`` give equal prompts in every process.

    Attributes
    ----------
    messages:
        Conversation so far, ending with a user message.
    data:
        Data that the environment needs to judge the answer.
    tools:
        Tools that the policy may call.
    """

    split: Split
    index: int
    messages: tuple[Message, ...]
    data: Any = None
    tools: tuple[Tool, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a rollout.

    Attributes
    ----------
    reward:
        Reward that the policy is trained on.
    parts:
        Named parts of the reward, for people; the same names for every rollout of an environment.
    """

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Tool call of the policy, or a malformed one.

    Attributes
    ----------
    name, arguments:
        Name and arguments of the tool; empty where they cannot be read.
    id:
        Identifier for the message with the result.
    status:
        Run a call only where it is ``ok``; `malformed_answer` makes the reply to others.
    raw:
        Sampled text, at most 4,096 characters.
    span:
        Its tokens, ``[begin, end)`` of the turn; None where the format does not tell.
    error:
        Description of the problem, where ``status`` is not enough.
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
    "invalid_json": "its arguments are not valid JSON",
    "unclosed_block": "it has no end",
    "missing_name": "it names no tool",
    "malformed_structure": "it is not in the format of tool calls",
    "unknown_tool": "there is no tool of that name",
}


def malformed_answer(call: ToolCall) -> Message:
    """Return a reply to a policy whose call is not ``ok``: a description of its problem."""
    more = f" ({call.error})" if call.error else ""
    return tool_message(call, f"error: the tool call was not run: {_WRONG[call.status]}{more}")


@dataclass(frozen=True, slots=True)
class Reply:
    """Reply of the policy in one turn.

    Attributes
    ----------
    text:
        Text without special tokens, thinking and tool calls.
    finished:
        False where it was cut at the token limit or the context length; the rollout cannot continue then.
    thinking:
        Thinking, where the model's format has it.
    calls:
        Tool calls, malformed ones included, where the model's format has them.
    tokens:
        Number of sampled tokens, the end of the turn included; None where it is unknown.
    context:
        Number of tokens of the conversation, this reply included; None where it is unknown.
    room:
        Number of tokens that there may still be behind them; None where it is unknown.
    fits:
        False where ``within`` forbade the messages: nothing was sampled, and the conversation is as before.
    """

    text: str
    finished: bool
    thinking: str = ""
    calls: tuple[ToolCall, ...] = ()
    tokens: int | None = None
    context: int | None = None
    room: int | None = None
    fits: bool = True


@dataclass(frozen=True, slots=True)
class PolicyEndpoint:
    """Address at which a program that speaks OpenAI's API reaches the policy of one rollout.

    Attributes
    ----------
    url:
        For ``OPENAI_BASE_URL``: ends with ``/v1``.
    key:
        For ``OPENAI_API_KEY``; the secret of this rollout.
    model:
        Name of the model.
    """

    url: str
    key: str = field(repr=False)
    model: str = "policy"


class Policy(Protocol):
    """Model as an environment sees it: one conversation, without token ids.

    Attributes
    ----------
    seed:
        Number of this rollout in ``[0, 2**63)``, equal in every run of the same recipe, for environments that make
        random choices.
    """

    @property
    def seed(self) -> int: ...

    async def reply(self, messages: Sequence[Message], *, anew: bool = False, within: int | None = None) -> Reply:
        """Return the policy's next turn.

        Parameters
        ----------
        messages:
            Messages since the last reply; for the first call, and with ``anew``, the whole prompt.
        anew:
            The conversation begins again with these messages: a declared branch of the rollout. Earlier
            messages are forgotten; what was sampled is trained on nevertheless.
        within:
            Maximum number of tokens that the conversation may have with the messages. Where it would have more, it
            stays as it is, and ``fits`` of the reply is False: other messages may follow. None: the context alone is a
            bound.
        """
        ...

    def endpoint(self) -> AbstractAsyncContextManager[PolicyEndpoint]:
        """Serve this rollout to a program by OpenAI's API, inside the context; `reply` is not used then.

        What the program samples is recorded, token by token. It may change its history: the rollout branches then.

        Raises
        ------
        EngineError
            When the context is left: no engine answered.
        NotImplementedError
            This policy has none.
        """
        ...


class WithoutEndpoint:
    """Part of a policy that has no endpoint for programs."""

    def endpoint(self) -> AbstractAsyncContextManager[PolicyEndpoint]:
        """Refuse (NotImplementedError)."""
        raise NotImplementedError("this policy replays given turns, and has no endpoint for programs")


class Environment(Protocol):
    """Source of tasks. Instances are shared by all rollouts and hold no state of a rollout.

    Attributes
    ----------
    name:
        Name in metrics.
    """

    @property
    def name(self) -> str: ...

    def prompt(self, split: Split, index: int) -> Prompt:
        """Return task ``index`` (0, 1, 2 …, unlimited for ``train``). Held-out tasks never occur in training."""
        ...

    async def rollout(self, prompt: Prompt, policy: Policy) -> Outcome:
        """Exchange messages with the policy until the task is done; return the outcome."""
        ...

    def demonstration(self, prompt: Prompt, *, correct: bool, rng: random.Random) -> Sequence[Message]:
        """Return a whole conversation for supervised warm-up: correct, or wrong in a plausible way.

        Raises
        ------
        NotImplementedError
            The environment has no demonstrations.
        """
        ...


@runtime_checkable
class RemotePrompts(Protocol):
    """Environment whose prompts come from another process: code with an event loop must await them."""

    async def fetch_prompt(self, split: Split, index: int) -> Prompt:
        """Return a prompt, as `Environment.prompt` does."""
        ...


async def prompt_of(environment: Environment, split: Split, index: int) -> Prompt:
    """Return a prompt of an environment, without blocking the event loop for one that runs in its own process."""
    if isinstance(environment, RemotePrompts):
        return await environment.fetch_prompt(split, index)
    return environment.prompt(split, index)
