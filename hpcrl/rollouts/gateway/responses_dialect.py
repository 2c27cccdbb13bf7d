"""OpenAI's newer form of a conversation: ``/v1/responses``. Nothing is stored: the program sends its whole history."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from hpcrl.rollouts.gateway.answers import ChatAnswer
from hpcrl.rollouts.gateway.dialects import DialectRequest, chat_request, function_tool, text_of_parts
from hpcrl.rollouts.gateway.errors import GatewayError, bad_request
from hpcrl.storage.msgspec_types import decode_json

_TEXT = frozenset({"text", "input_text", "output_text", "reasoning_text"})
_PIECE = 4096
"""Maximum characters of a part of a stream."""


class _Request(msgspec.Struct, frozen=True):
    input: str | list[dict[str, Any]]
    model: str = "policy"
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    stream: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    # asked for and not followed: sampling is the recipe's
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None


class ResponsesDialect:
    """See `hpcrl.rollouts.gateway.dialects.Dialect`."""

    def request(self, body: bytes) -> DialectRequest:
        """Read a request (GatewayError, 400, where it is none, or names what was stored)."""
        try:
            asked: _Request = decode_json(body, _Request)
        except msgspec.DecodeError as error:
            raise bad_request(str(error)) from error
        for name in ("previous_response_id", "conversation", "background"):
            if getattr(asked, name):
                raise bad_request(f"{name} is not served: nothing is stored, send the whole history as input", name)
        messages: list[dict[str, Any]] = []
        if asked.instructions:
            messages.append({"role": "system", "content": asked.instructions})
        items = [{"role": "user", "content": asked.input}] if isinstance(asked.input, str) else asked.input
        for number, item in enumerate(items):
            _take(item, f"input[{number}]", messages)
        wanted = (asked.text or {}).get("format") or {}
        chat = chat_request(
            messages,
            model=asked.model,
            tools=[_tool(each) for each in asked.tools or ()],
            stream=asked.stream,
            max_tokens=asked.max_output_tokens,
            temperature=asked.temperature,
            top_p=asked.top_p,
            tool_choice=asked.tool_choice,
            parallel_tool_calls=asked.parallel_tool_calls,
            response_format=wanted or None,
            reasoning_effort=(asked.reasoning or {}).get("effort"),
        )
        said = {"model": asked.model, "instructions": asked.instructions, "tools": asked.tools or []}
        return DialectRequest(chat, said)

    def body(self, answer: ChatAnswer, said: Mapping[str, Any]) -> dict[str, Any]:
        """Return the JSON of an answer."""
        prompt, sampled = len(answer.sampled.prompt), len(answer.sampled.turn.token_ids)
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + sampled,
        }
        cut = answer.finish_reason == "length"
        ended = {
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        }
        return self._begun(answer, said) | ended | {"output": _items(answer), "usage": usage}

    def events(self, answer: ChatAnswer, said: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the answer as numbered events of a stream."""
        for number, event in enumerate(self._events(answer, said)):
            yield {**event, "sequence_number": number}

    def _events(self, answer: ChatAnswer, said: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        begun = self._begun(answer, said)
        yield {"type": "response.created", "response": begun}
        yield {"type": "response.in_progress", "response": begun}
        for index, item in enumerate(_items(answer)):
            yield from _item_events(item, index)
        whole = self.body(answer, said)
        yield {"type": f"response.{whole['status']}", "response": whole}

    def error(self, error: GatewayError) -> dict[str, Any]:
        """Return the JSON of an error: that of all of OpenAI's API."""
        return error.body

    def _begun(self, answer: ChatAnswer, said: Mapping[str, Any]) -> dict[str, Any]:
        name = f"resp_{answer.name.removeprefix('chatcmpl-')}"
        head = {"id": name, "object": "response", "created_at": answer.created, "status": "in_progress"}
        neutral: dict[str, Any] = {
            "error": None,
            "incomplete_details": None,
            "metadata": {},
            "output": [],
            "usage": None,
        }
        choice = {"parallel_tool_calls": True, "tool_choice": "auto", "temperature": None, "top_p": None}
        return head | neutral | choice | dict(said)


def _tool(given: Mapping[str, Any]) -> dict[str, Any]:
    if given.get("type") != "function" or not isinstance(given.get("name"), str):
        raise bad_request(f"tools of the type {given.get('type')!r} are not served, only functions", "tools")
    if not isinstance(given.get("parameters") or {}, Mapping):
        raise bad_request("parameters of a tool must be an object", "tools")
    return function_tool(given["name"], given.get("description"), given.get("parameters"))


def _take(item: Mapping[str, Any], where: str, messages: list[dict[str, Any]]) -> None:
    """Append an item to messages: those of one turn of the policy are one message."""
    match item.get("type", "message"):
        case "message" if item.get("role") == "assistant":
            _turn(messages)["content"] += text_of_parts(item.get("content"), where, _TEXT)
        case "message":
            content = text_of_parts(item.get("content"), where, _TEXT)
            messages.append({"role": item.get("role"), "content": content})
        case "reasoning":
            thought = text_of_parts(item.get("content"), where, _TEXT)
            # it comes first in a turn; one that stands behind calls begins the next turn
            _turn(messages).setdefault("reasoning_content", thought)
        case "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            _turn(messages).setdefault("tool_calls", []).append(call)
        case "function_call_output":
            content = text_of_parts(item.get("output"), where, _TEXT)
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        case kind:
            raise bad_request(f"{where} has the type {kind!r}, which is not served", "input")


def _turn(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the turn of the policy that messages end with; begin one where they end otherwise."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _items(answer: ChatAnswer) -> list[dict[str, Any]]:
    turn, own, found = answer.turn, answer.name.removeprefix("chatcmpl-"), list[dict[str, Any]]()
    if thinking := turn.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": thinking}]
        found.append({"id": f"rs_{own}", "type": "reasoning", "summary": [], "content": content})
    if turn["content"] or not answer.calls:
        text = {"type": "output_text", "text": turn["content"], "annotations": [], "logprobs": []}
        head = {"id": f"msg_{own}", "type": "message", "role": "assistant", "status": "completed"}
        found.append({**head, "content": [text]})
    for number, call in enumerate(answer.calls):
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        head = {"id": f"fc_{own}_{number}", "type": "function_call", "status": "completed"}
        found.append({**head, "call_id": call.id, "name": call.name, "arguments": arguments})
    return found


def _item_events(item: Mapping[str, Any], index: int) -> Iterator[dict[str, Any]]:
    place: dict[str, Any] = {"item_id": item["id"], "output_index": index}
    kind = item["type"]
    empty: dict[str, Any] = {"arguments": ""} if kind == "function_call" else {"content": []}
    progress = {} if kind == "reasoning" else {"status": "in_progress"}
    yield {"type": "response.output_item.added", "output_index": index, "item": {**item, **empty, **progress}}
    if kind == "function_call":
        yield from _pieces("response.function_call_arguments", place, "arguments", item["arguments"])
    else:
        part, within = item["content"][0], {**place, "content_index": 0}
        name = "response.output_text" if kind == "message" else "response.reasoning_text"
        if kind == "message":
            yield {"type": "response.content_part.added", **within, "part": {**part, "text": ""}}
        yield from _pieces(name, within | ({"logprobs": []} if kind == "message" else {}), "text", part["text"])
        if kind == "message":
            yield {"type": "response.content_part.done", **within, "part": part}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _pieces(name: str, place: Mapping[str, Any], field: str, text: str) -> Iterator[dict[str, Any]]:
    for at in range(0, len(text), _PIECE):
        yield {"type": f"{name}.delta", **place, "delta": text[at : at + _PIECE]}
    yield {"type": f"{name}.done", **place, field: text}
