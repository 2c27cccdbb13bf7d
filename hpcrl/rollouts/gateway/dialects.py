"""Common parts of the other dialects of the gateway: what a program says becomes a request for a chat completion."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from hpcrl.rollouts.gateway.answers import ChatAnswer
from hpcrl.rollouts.gateway.errors import GatewayError, bad_request
from hpcrl.rollouts.gateway.messages import ChatCompletionRequest


class DialectRequest(NamedTuple):
    """A request of a program.

    Attributes
    ----------
    chat:
        The same as a request for a chat completion.
    said:
        What answers repeat of it.
    """

    chat: ChatCompletionRequest
    said: Mapping[str, Any]


class Dialect(Protocol):
    """A form of requests and answers."""

    def request(self, body: bytes) -> DialectRequest:
        """Read a request (GatewayError, 400, where it is none)."""
        ...

    def body(self, answer: ChatAnswer, said: Mapping[str, Any]) -> dict[str, Any]:
        """Return the JSON of an answer."""
        ...

    def events(self, answer: ChatAnswer, said: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the answer as events of a stream; ``type`` of each is its name."""
        ...

    def error(self, error: GatewayError) -> dict[str, Any]:
        """Return the JSON of an error."""
        ...


def chat_request(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], **fields: Any
) -> ChatCompletionRequest:
    """Return the request for messages and tools in the form of chat completions.

    GatewayError, 400, where one has a number beyond 64 bits, or is nested too deeply.
    """
    try:
        given, offered = (msgspec.Raw(msgspec.json.encode(each)) for each in (messages, tools))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise bad_request(f"a message or a tool is not plain data: {error}") from error
    return ChatCompletionRequest(messages=given, tools=offered, **fields)


def function_tool(name: str, description: str | None, parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a tool in the form of chat completions."""
    function: dict[str, Any] = {"name": name, "parameters": dict(parameters or {"type": "object", "properties": {}})}
    if description is not None:
        function["description"] = description
    return {"type": "function", "function": function}


def text_of_parts(content: Any, where: str, kinds: frozenset[str]) -> str:
    """Return the text of a content: text, or a list of parts of these kinds (GatewayError, 400, for others)."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{where} must be text, or a list of parts", where)
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) and part.get("type") in kinds else None
        if not isinstance(text, str):
            raise bad_request(f"{where} has a part other than text", where)
        texts.append(text)
    return "".join(texts)
