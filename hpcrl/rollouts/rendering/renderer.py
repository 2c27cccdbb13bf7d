"""Render messages to token ids incrementally: earlier tokens of a conversation are never tokenized again.

A conversation is rendered by the model's own chat template. Its opening is rendered as it is. An extension, the
messages between two turns of the policy, is rendered in a small conversation in which the turn before it is a
placeholder: the extension is all that the template writes after the end of that turn. So the token that ended a turn is
in the sequence once, as it was sampled, also where it is the beginning of the next message, as in GLM's templates,
whose turns have no end of their own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from hpcrl.config.chat import ChatFormat
from hpcrl.models.chat_template import ChatTemplateError
from hpcrl.models.generation_config import end_tokens
from hpcrl.models.tokenizer import ChatTokenizer, Rendered
from hpcrl.rollouts.environments.base import Message, Tool, ToolCall
from hpcrl.rollouts.rendering.formats import find_format, make_parser, same_ends, thinking_parser
from hpcrl.rollouts.rendering.parsing import Parsed, TurnParser

_MARK = "hpcrl-mark-of-a-reply"
_NAMELESS = "unknown"
"""Name of a call without a name, where the conversation must have one."""


@dataclass(frozen=True, slots=True)
class Extension:
    """Tokens between two turns of the policy.

    Attributes
    ----------
    token_ids:
        They follow the sampled token that ended the turn before.
    ended_otherwise:
        The policy ended that turn by another token than the template would have: ``token_ids`` begin with the
        template's token.
    """

    token_ids: list[int]
    ended_otherwise: bool = False


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole conversation up to where the policy speaks.

    Attributes
    ----------
    thinking:
        Some turn's thinking is in it.
    """

    token_ids: list[int]
    thinking: bool


class Renderer:
    """Renders the pieces of conversations with a model, and parses its turns.

    Attributes
    ----------
    cuts_thinking:
        Earlier thinking is left out where the template does so: a conversation may branch there.
    stop_token_ids:
        Tokens that end a turn: those of the tokenizer, of generation_config.json (else config.json) and of the format.
    format:
        Format of thinking and tool calls; None: turns are text, and thinking in ``<think>`` where that is a token.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        *,
        stop_token_ids: Sequence[int] = (),
        chat_format: ChatFormat | None = None,
        variables: Mapping[str, Any] | None = None,
        thinking: Literal["kept", "cut"] = "kept",
        finds_thinking: bool = False,
    ) -> None:
        """Prepare a tokenizer.

        Parameters
        ----------
        stop_token_ids:
            Further tokens that end a turn.
        chat_format:
            See `hpcrl.rollouts.rendering.formats`.
        variables:
            Variables of the chat template, for example ``enable_thinking``.
        thinking:
            See `hpcrl.config.chat.ChatConfig`.
        finds_thinking:
            Without a format, thinking is found by its control tokens.

        Raises
        ------
        UsageError
            The model does not have the format.
        """
        self.cuts_thinking = thinking == "cut"
        self._tokenizer, self.format, self._variables = tokenizer, chat_format, dict(variables or {})
        own_ends: tuple[int, ...] = ()
        parse = None
        if chat_format is not None:
            parse, own_ends = make_parser(chat_format, tokenizer, self._variables)
        elif finds_thinking:
            parse = thinking_parser(tokenizer)
        self._parser = TurnParser(tokenizer, parse)
        self.stop_token_ids = tuple(dict.fromkeys((tokenizer.eos_token_id, *stop_token_ids, *own_ends)))
        self._same_ends = same_ends(chat_format, tokenizer)
        self._ends = frozenset(self.stop_token_ids) | frozenset(self._same_ends.values())
        self._arguments_as_text: bool | None = None

    @classmethod
    def of_model(
        cls,
        model_dir: Path,
        *,
        chat_format: ChatFormat | Literal["auto", "text"] = "auto",
        variables: Mapping[str, Any] | None = None,
        thinking: Literal["kept", "cut"] = "kept",
    ) -> Renderer:
        """Read tokenizer, chat template and stop tokens of a model directory, and find its format.

        Raises
        ------
        TokenizerError, ChatTemplateError
            See `ChatTokenizer`.
        ValueError
            config.json or generation_config.json cannot be read.
        UsageError
            The model does not have the format.
        """
        tokenizer = ChatTokenizer(model_dir)
        ends = end_tokens(model_dir)
        found = find_format(model_dir, tokenizer) if chat_format == "auto" else chat_format
        known = None if found == "text" else found
        return cls(
            tokenizer,
            stop_token_ids=ends,
            chat_format=known,
            variables=variables,
            thinking=thinking,
            finds_thinking=found is None,
        )

    def opening(
        self, messages: Sequence[Message], *, tools: Sequence[Tool] = (), now: datetime | None = None
    ) -> list[int]:
        """Return token ids of a conversation up to where the policy speaks; ``now`` is the time it begins at.

        Raises
        ------
        ChatTemplateError
            The template refuses the conversation.
        """
        return self._tokenizer.encode_rendered(self._render(messages, tools, now))

    def extension(
        self,
        messages: Sequence[Message],
        *,
        ended_by: int,
        calls: Sequence[ToolCall] = (),
        tools: Sequence[Tool] = (),
        thought: bool = False,
        now: datetime | None = None,
    ) -> Extension | None:
        """Return the tokens from a sampled turn to the next one; None where appending cannot continue the conversation.

        None is a branch: the template removes earlier thinking from the context, so that this prompt is not a prefix of
        the next one.

        Parameters
        ----------
        messages:
            Messages that follow the turn.
        ended_by:
            The token that the turn ended with.
        calls:
            Calls of the turn.
        thought:
            Whether there is thinking in the turns before.

        Raises
        ------
        ValueError
            The template does not write replies as they are, ended by a token that ends turns.
        """
        rendered = self._after_turn(messages, calls, tools, now)
        if self.cuts_thinking and thought and self._leaves_thinking_out(messages, calls, tools, now):
            return None
        before, mark, _ = rendered.text.rpartition(_MARK)
        # encoded with the text after the placeholder: the rest of its turn is the template's, and is not used
        ids = self._tokenizer.encode_rendered(rendered[len(before) + len(mark) :]) if mark else []
        at = next((i for i, token in enumerate(ids) if token in self._ends), None)
        if at is None:
            ends = ", ".join(repr(self._tokenizer.decode([end], skip_special_tokens=False)) for end in self._ends)
            raise ValueError(
                f"the chat template does not end replies with a token that ends turns ({ends}); several turns need that"
            )
        if ids[at] in (ended_by, self._same_ends.get(ended_by)):
            return Extension(ids[at + 1 :])
        return Extension(ids[at:], ended_otherwise=True)

    def message_of(self, parsed: Parsed) -> Message:
        """Return a sampled turn as a message for `whole`.

        A call that cannot be run stands in the content as it was written. It is among the calls as well, without
        arguments, because templates want a call before a result.
        """
        bad = [call.raw for call in parsed.calls if call.status not in ("ok", "unknown_tool")]
        message: dict[str, Any] = {"role": "assistant", "content": "\n".join(filter(None, [parsed.text, *bad]))}
        if parsed.thinking:
            message["reasoning_content"] = parsed.thinking
        if parsed.calls:
            message["tool_calls"] = [_written(call, dict(call.arguments)) for call in parsed.calls]
        return message

    def whole(self, messages: Sequence[Message], *, tools: Sequence[Tool] = (), now: datetime | None = None) -> Whole:
        """Render a conversation with turns of the policy in it, as the template writes all of it now.

        Parameters
        ----------
        messages:
            From the first one on; turns of the policy as `message_of` makes them.

        Raises
        ------
        ChatTemplateError
            The template refuses the conversation.
        """
        calls = next((message["tool_calls"] for message in messages if message.get("tool_calls")), None)
        if calls and self._arguments_as_text is None:
            self._with_calls([], [_call_of({"name": calls[0]["function"]["name"]})], tools, now)
        if self._arguments_as_text:
            messages = [_with_text_arguments(message) for message in messages]
        try:
            rendered = self._render(messages, tools, now)
        except ChatTemplateError:
            # some templates refuse a turn that has a text in addition to thinking and calls
            messages = [_with_text_in_thinking(message) for message in messages]
            rendered = self._render(messages, tools, now)
        thoughts = [str(message.get("reasoning_content") or "").strip() for message in messages]
        kept = any(thought in rendered.text for thought in thoughts if thought)
        return Whole(self._tokenizer.encode_rendered(rendered), kept)

    def parse(
        self, token_ids: Sequence[int], *, said: Sequence[int] = (), tools: Sequence[Tool] = (), turn: int = 0
    ) -> Parsed:
        """See `hpcrl.rollouts.rendering.parsing.TurnParser`."""
        return self._parser.parse(token_ids, said=said, tools=tools, turn=turn)

    @property
    def vocab_size(self) -> int:
        """Number of token ids of the tokenizer."""
        return self._tokenizer.vocab_size

    def reads(self, name: str) -> bool:
        """Return whether the chat template mentions a field of messages or a role."""
        return self._tokenizer.template_reads(name)

    def full_text(self, token_ids: Sequence[int]) -> str:
        """Return the text of a whole sequence with its special tokens, for people."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def ids_of_text(self, text: str) -> list[int]:
        """Return token ids of a text of `full_text`: special tokens are taken for what they spell.

        They may be others than those that were sampled, and stand for the same text.
        """
        return self._tokenizer.encode(text)

    def _after_turn(
        self, messages: Sequence[Message], calls: Sequence[ToolCall], tools: Sequence[Tool], now: datetime | None
    ) -> Rendered:
        if calls:
            return self._with_calls(messages, calls, tools, now)
        try:
            return self._after(messages, {"role": "assistant", "content": _MARK}, tools, now)
        except ChatTemplateError:
            if not messages or messages[0].get("role") != "tool":
                raise
            # a tool result for a call that the environment itself found in the text; some templates require a call
            # before it
            return self._with_calls(messages, [_call_of(messages[0])], tools, now)

    def _leaves_thinking_out(
        self, messages: Sequence[Message], calls: Sequence[ToolCall], tools: Sequence[Tool], now: datetime | None
    ) -> bool:
        """Return whether a turn's thinking is not written any more where ``messages`` follow the turn."""
        turn: dict[str, Any] = {"role": "assistant", "content": "x", "reasoning_content": _MARK}
        if not calls and messages and messages[0].get("role") == "tool":
            calls = [_call_of(messages[0])]
        if calls:
            arguments: Any = "{}" if self._arguments_as_text else {}
            turn |= {"content": "", "tool_calls": [_written(call, arguments) for call in calls]}
        return _MARK not in self._after(messages, turn, tools, now).text

    def _with_calls(
        self, messages: Sequence[Message], calls: Sequence[ToolCall], tools: Sequence[Tool], now: datetime | None
    ) -> Rendered:
        """Render a turn with calls whose arguments are the mark: as objects, or as text where a template wants that."""
        ways = (False, True) if self._arguments_as_text is None else (self._arguments_as_text,)
        for as_text in ways:
            arguments: Any = f'{{"mark": "{_MARK}"}}' if as_text else {"mark": _MARK}
            turn = {
                "role": "assistant",
                "content": "",
                "tool_calls": [_written(call, arguments) for call in calls],
            }
            try:
                rendered = self._after(messages, turn, tools, now)
            except ChatTemplateError:
                if as_text is ways[-1]:
                    raise
                continue
            if _MARK in rendered.text or as_text is ways[-1]:
                self._arguments_as_text = as_text
                return rendered
        raise AssertionError("the last way has returned or raised")

    def _after(
        self, messages: Sequence[Message], turn: Message, tools: Sequence[Tool], now: datetime | None
    ) -> Rendered:
        return self._render([{"role": "user", "content": ""}, turn, *messages], tools, now)

    def _render(self, messages: Sequence[Message], tools: Sequence[Tool], now: datetime | None) -> Rendered:
        return self._tokenizer.render_marked(
            messages, add_generation_prompt=True, tools=list(tools) or None, now=now, **self._variables
        )


def _call_of(result: Message) -> ToolCall:
    """Return a call that a tool's result may belong to."""
    name, number = (str(result.get(key) or _NAMELESS) for key in ("name", "tool_call_id"))
    return ToolCall(name, {}, number)


def _written(call: ToolCall, arguments: Any) -> dict[str, Any]:
    """Return a call as messages have it."""
    return {"id": call.id, "type": "function", "function": {"name": call.name or _NAMELESS, "arguments": arguments}}


def _with_text_in_thinking(message: Message) -> Message:
    """Return a message that has its text behind its thinking, where it has both and calls."""
    thought, content = message.get("reasoning_content"), message.get("content")
    if not (message.get("tool_calls") and thought and content):
        return message
    return {**message, "reasoning_content": f"{thought}\n\n{content}", "content": ""}


def _with_text_arguments(message: Message) -> Message:
    """Return a message whose calls have their arguments as JSON text."""
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}
