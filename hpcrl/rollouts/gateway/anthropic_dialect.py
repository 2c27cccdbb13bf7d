"""Anthropic's form of a conversation: ``/v1/messages``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from hpcrl.rollouts.gateway.answers import ChatAnswer
from hpcrl.rollouts.gateway.dialects import DialectRequest, chat_request, function_tool, text_of_parts
from hpcrl.rollouts.gateway.errors import GatewayError, bad_request
from hpcrl.storage.msgspec_types import decode_json

_TEXT = frozenset({"text"})
_PIECE = 4096
"""Maximum characters of a part of a stream."""
_ERRORS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}


class _Turn(msgspec.Struct, frozen=True):
    role: str
    content: str | list[dict[str, Any]]


class _Tool(msgspec.Struct, frozen=True):
    name: str
    input_schema: dict[str, Any] | None = None
    description: str | None = None


class _Request(msgspec.Struct, frozen=True):
    messages: list[_Turn]
    model: str = "policy"
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    mcp_servers: list[dict[str, Any]] | None = None
    stream: bool | None = None
    # asked for and not followed: sampling is the recipe's
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    tool_choice: dict[str, Any] | None = None


class AnthropicDialect:
    """See `hpcrl.rollouts.gateway.dialects.Dialect`."""

    def request(self, body: bytes) -> DialectRequest:
        """Read a request (GatewayError, 400, where it is none)."""
        try:
            asked: _Request = decode_json(body, _Request)
        except msgspec.DecodeError as error:
            raise bad_request(str(error)) from error
        if asked.mcp_servers:
            raise bad_request("mcp_servers are not served: offer their tools with an input_schema", "mcp_servers")
        if not asked.messages:
            raise bad_request("messages must not be empty", "messages")
        messages: list[dict[str, Any]] = []
        if system := text_of_parts(asked.system, "system", _TEXT):
            messages.append({"role": "system", "content": system})
        for number, turn in enumerate(asked.messages):
            messages += _messages_of(turn, f"messages[{number}]")
        choice = (asked.tool_choice or {}).get("type", "auto")
        chat = chat_request(
            messages,
            model=asked.model,
            tools=[_tool(each) for each in asked.tools or ()],
            stream=asked.stream,
            max_tokens=asked.max_tokens,
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=asked.top_k,
            stop=asked.stop_sequences,
            tool_choice=choice if choice in ("auto", "none") else asked.tool_choice,
        )
        return DialectRequest(chat, {"model": asked.model})

    def body(self, answer: ChatAnswer, said: Mapping[str, Any]) -> dict[str, Any]:
        """Return the JSON of an answer."""
        ended = {"stop_reason": _REASONS[answer.finish_reason], "stop_sequence": None}
        return _head(answer, said) | {"content": _blocks(answer), **ended, "usage": _usage(answer)}

    def events(self, answer: ChatAnswer, said: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the answer as events of a stream."""
        open_ended: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        begun = _head(answer, said) | open_ended | {"usage": _usage(answer) | {"output_tokens": 0}}
        yield {"type": "message_start", "message": begun}
        for index, block in enumerate(_blocks(answer)):
            field, delta = _STREAMED[block["type"]]
            whole = block[field]
            text = whole if isinstance(whole, str) else msgspec.json.encode(whole).decode()
            empty = {**block, field: "" if isinstance(whole, str) else {}}
            yield {"type": "content_block_start", "index": index, "content_block": empty}
            for at in range(0, len(text), _PIECE):
                piece = {"type": delta, _DELTAS[delta]: text[at : at + _PIECE]}
                yield {"type": "content_block_delta", "index": index, "delta": piece}
            yield {"type": "content_block_stop", "index": index}
        ended = {"stop_reason": _REASONS[answer.finish_reason], "stop_sequence": None}
        yield {"type": "message_delta", "delta": ended, "usage": _usage(answer)}
        yield {"type": "message_stop"}

    def error(self, error: GatewayError) -> dict[str, Any]:
        """Return the JSON of an error; a full context in the words that programs know."""
        kind = _ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        what = f"prompt is too long: {error}" if error.code == "context_length_exceeded" else str(error)
        return {"type": "error", "error": {"type": kind, "message": what}}


_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_STREAMED = {
    "thinking": ("thinking", "thinking_delta"),
    "text": ("text", "text_delta"),
    "tool_use": ("input", "input_json_delta"),
}
_DELTAS = {"thinking_delta": "thinking", "text_delta": "text", "input_json_delta": "partial_json"}


def _tool(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool of the program in the form of chat completions.

    Tools that Anthropic's servers run or define have a type of their own and no schema: the policy knows none of them,
    and the gateway runs none.
    """
    # before the fields, which such a tool may lack
    if given.get("type") not in (None, "custom"):
        raise bad_request(f"tools of the type {given['type']!r} are not served, only those of the program", "tools")
    try:
        tool = msgspec.convert(given, _Tool)
    except msgspec.ValidationError as error:
        raise bad_request(f"tools: {error}", "tools") from error
    return function_tool(tool.name, tool.description, tool.input_schema)


def _messages_of(turn: _Turn, where: str) -> list[dict[str, Any]]:
    """Return a turn as messages: results of tools are messages of their own."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    if turn.role == "assistant":
        return [_assistant(turn.content, where)]
    found: list[dict[str, Any]] = []
    for block in turn.content:
        if block.get("type") == "tool_result":
            content = text_of_parts(block.get("content"), where, _TEXT)
            found.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content})
        elif found and found[-1]["role"] == turn.role:
            found[-1]["content"] += text_of_parts([block], where, _TEXT)
        else:
            found.append({"role": turn.role, "content": text_of_parts([block], where, _TEXT)})
    return found


def _assistant(blocks: list[dict[str, Any]], where: str) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for block in blocks:
        match block.get("type"):
            case "thinking":
                thoughts.append(str(block.get("thinking", "")))
            case "redacted_thinking":
                continue
            case "tool_use":
                function = {"name": block.get("name"), "arguments": block.get("input")}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case _:
                texts.append(text_of_parts([block], where, _TEXT))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    return message | ({"tool_calls": calls} if calls else {})


def _head(answer: ChatAnswer, said: Mapping[str, Any]) -> dict[str, Any]:
    name = f"msg_{answer.name.removeprefix('chatcmpl-')}"
    return {"id": name, "type": "message", "role": "assistant", "model": said["model"]}


def _blocks(answer: ChatAnswer) -> list[dict[str, Any]]:
    turn, found = answer.turn, list[dict[str, Any]]()
    if thinking := turn.get("reasoning_content"):
        found.append({"type": "thinking", "thinking": thinking, "signature": ""})
    if turn["content"]:
        found.append({"type": "text", "text": turn["content"]})
    for call in answer.calls:
        found.append({"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments)})
    return found


def _usage(answer: ChatAnswer) -> dict[str, int]:
    return {"input_tokens": len(answer.sampled.prompt), "output_tokens": len(answer.sampled.turn.token_ids)}
