"""Requests as programs send them: checked, normalised, and compared by digests.

A chat template gets of a message what it may read, and nothing else: fields that a program adds for itself have no
effect. Two messages are the same where their digests are. That of a turn of the policy has neither identifiers of calls
nor thinking, which programs drop or write anew.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import msgspec
import xxhash

from hpcrl.rollouts.environments.messages import plain_messages, plain_tools
from hpcrl.rollouts.gateway.errors import bad_request
from hpcrl.storage.msgspec_types import decode_json

_MAX_CALLS = 256
"""Maximum number of tool calls of one message."""
_MAX_KNOWN_BYTES = 32 << 20
"""Bytes of messages that one rollout may have read before all are read anew: a program may send others each time."""
_HEADS = 4
"""Number of latest requests of a rollout of which the next one may be a continuation: conversations may alternate."""
_WHITE_SPACE = b" \t\r\n"


class _StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Content of a stream in addition to the answer."""

    include_usage: bool | None = None


class ChatCompletionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of ``/v1/chat/completions``. Fields that are not named here have no effect.

    Messages and tools are read by `MessageReader`, which knows most of them from the request before.
    """

    messages: msgspec.Raw
    model: str | None = None
    tools: msgspec.Raw = msgspec.Raw()
    n: int | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    logprobs: bool | None = None
    # asked for and not followed: sampling is the recipe's
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenSampling(msgspec.Struct, frozen=True, kw_only=True):
    """``sampling_params`` of `TokenRequest`."""

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None


class TokenRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of ``/inference/v1/generate``: token ids of a prompt that the client has rendered."""

    token_ids: list[int]
    sampling_params: TokenSampling = TokenSampling()
    model: str | None = None
    stream: bool | None = None


def read_request(body: bytes, kind: type[ChatCompletionRequest] | type[TokenRequest]) -> Any:
    """Return a request.

    Raises
    ------
    GatewayError
        400: it is not JSON, a field is missing or of another type, or it asks for several answers.
    """
    try:
        request = decode_json(body, kind)
    except msgspec.DecodeError as error:
        raise bad_request(str(error)) from error
    answers = request.n if isinstance(request, ChatCompletionRequest) else request.sampling_params.n
    if answers not in (None, 1):
        raise bad_request(f"n must be 1, not {answers}: an answer is one turn of a rollout", "n")
    return request


class ReadMessage(NamedTuple):
    """A message as the chat template may read it, and what tells it from others.

    Attributes
    ----------
    message:
        Its content is text, and arguments of calls are objects. Must not be changed.
    digest:
        Digest of the parts that distinguish it from other messages.
    """

    message: dict[str, Any]
    digest: bytes


class ReadTools(NamedTuple):
    """Tools of a request as plain data, which must not be changed, and their digest."""

    tools: list[dict[str, Any]]
    digest: bytes


class ReadHistory(NamedTuple):
    """Messages of a request. Neither list must be changed.

    Attributes
    ----------
    messages:
        As the chat template may read them.
    digests:
        Digests of all beginnings of the conversation: of its tools alone, with the first message, and so on.
    """

    messages: list[dict[str, Any]]
    digests: list[bytes]


class _Head(NamedTuple):
    """The messages of a request as text up to the end of the last one: length in bytes, digest, and what it says."""

    length: int
    digest: bytes
    history: ReadHistory


class MessageReader:
    """Reads tools and messages of one rollout, each once: a program sends its whole history with every request.

    The text of a request usually begins with that of the one before. That is found by one hash of the beginning, and
    only the rest is read.
    """

    def __init__(self, *, knows_developer: Callable[[], bool]) -> None:
        """Begin.

        Parameters
        ----------
        knows_developer:
            The chat template knows the role ``developer``; if not, ``system`` replaces it.
        """
        self._knows_developer = knows_developer
        self._known: dict[bytes, ReadMessage] = {}
        self._known_tools: dict[bytes, ReadTools] = {}
        self._heads: deque[_Head] = deque(maxlen=_HEADS)
        self._names: dict[str, str] = {}
        self._known_bytes = 0

    def tools(self, given: msgspec.Raw) -> ReadTools:
        """Return tools (GatewayError, 400, where one is none); ``given`` may be empty."""
        data = memoryview(given)
        key = xxhash.xxh3_128_digest(data)
        known = self._known_tools.get(key)
        if known is None:
            self._make_room()
            known = self._known_tools[key] = _tools_of(data)
            self._known_bytes += len(data)
        return known

    def read(self, given: msgspec.Raw, tools: ReadTools) -> ReadHistory:
        """Return messages (GatewayError, 400, where there is none, or one is not a message of text)."""
        self._make_room()
        data = memoryview(given)
        before, rest = self._known_beginning(data, tools)
        pieces = _pieces(rest)
        if not pieces and not before.messages:
            raise bad_request("messages must not be empty", "messages")
        messages, digests = [*before.messages], [*before.digests]
        for number, raw in enumerate(pieces, len(messages)):
            piece = memoryview(raw)
            key = xxhash.xxh3_128_digest(piece)
            known = self._known.get(key)
            if known is None:
                known = self._known[key] = self._read(piece, f"messages[{number}]")
                self._known_bytes += len(piece)
            messages.append(known.message)
            digests.append(xxhash.xxh3_128_digest(digests[-1] + known.digest))
        history = ReadHistory(messages, digests)
        # without the bracket that closes the list: the next request has a comma there
        length = len(data) - 1
        while data[length - 1] in _WHITE_SPACE:
            length -= 1
        self._heads.append(_Head(length, xxhash.xxh3_128_digest(data[:length]), history))
        return history

    def _known_beginning(self, data: memoryview, tools: ReadTools) -> tuple[ReadHistory, memoryview | bytes]:
        """Return what is known of a list of messages, and the text of the list of the others."""
        for head in reversed(self._heads):
            if len(data) <= head.length or head.history.digests[0] != tools.digest:
                continue
            if xxhash.xxh3_128_digest(data[: head.length]) != head.digest:
                continue
            # a message ends there: in JSON a comma or the end of the list follows
            return head.history, b"[" + bytes(data[head.length : -1]).strip(_WHITE_SPACE)[1:] + b"]"
        return ReadHistory([], [tools.digest]), data

    def _make_room(self) -> None:
        if self._known_bytes > _MAX_KNOWN_BYTES:
            # names, too: those of calls that are still in the history are read again with it
            for known in (self._known, self._known_tools, self._heads, self._names):
                known.clear()
            self._known_bytes = 0

    def _read(self, data: memoryview, where: str) -> ReadMessage:
        try:
            given = decode_json(data)
        except msgspec.DecodeError as error:
            raise bad_request(f"{where}: {error}", "messages") from error
        if not isinstance(given, dict):
            raise bad_request(f"{where} must be an object", "messages")
        made = _message(given, where, self._names)
        if made["role"] == "developer" and not self._knows_developer():
            made["role"] = "system"
        try:
            (plain,) = plain_messages([made])
        except (TypeError, ValueError) as error:
            raise bad_request(f"{where}: {error}", "messages") from error
        return ReadMessage(plain, _digest(plain))


def _tools_of(data: memoryview) -> ReadTools:
    try:
        given: list[dict[str, Any]] | None = decode_json(data, list[dict[str, Any]] | None) if data else None
        tools = plain_tools(given or ())
    except (TypeError, ValueError) as error:  # of JSON, too
        raise bad_request(f"tools: {error}", "tools") from error
    return ReadTools(tools, xxhash.xxh3_128_digest(_encoder.encode(tools)))


def _pieces(data: memoryview | bytes) -> list[msgspec.Raw]:
    """Return the texts of the messages in a list."""
    try:
        return decode_json(data, list[msgspec.Raw])
    except msgspec.DecodeError as error:
        raise bad_request(f"messages: {error}", "messages") from error


def _message(message: Mapping[str, Any], where: str, names: dict[str, str]) -> dict[str, Any]:
    made: dict[str, Any] = {"role": message.get("role"), "content": _text(message.get("content"), where)}
    if isinstance(name := message.get("name"), str):
        made["name"] = name
    if message.get("role") == "assistant":
        thinking = message.get("reasoning_content") or message.get("reasoning")
        if isinstance(thinking, str):
            made["reasoning_content"] = thinking
        if message.get("tool_calls"):
            made["tool_calls"] = [_call(call, where, names) for call in _calls(message["tool_calls"], where)]
    if message.get("role") == "tool" and isinstance(number := message.get("tool_call_id"), str):
        made["tool_call_id"] = number
        # OpenAI's messages do not have it, and some templates read it
        made.setdefault("name", names.get(number, "unknown"))
    return made


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{where}.content must be text", "messages")
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text" if kind == "text" else "refusal") if kind in ("text", "refusal") else None
        if not isinstance(text, str):
            raise bad_request(f"{where}.content has a part that is not text", "messages")
        parts.append(text)
    return "".join(parts)


def _calls(given: Any, where: str) -> list[Any]:
    if not isinstance(given, list) or len(given) > _MAX_CALLS:
        raise bad_request(f"{where}.tool_calls must be a list of at most {_MAX_CALLS} calls", "messages")
    return given


def _call(call: Any, where: str, names: dict[str, str]) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str):
        raise bad_request(f"{where}.tool_calls has no function with a name", "messages")
    number = call.get("id")
    number = number if isinstance(number, str) else ""
    names[number] = name
    return {
        "id": number,
        "type": "function",
        "function": {"name": name, "arguments": arguments_of(function.get("arguments"))},
    }


def arguments_of(given: Any) -> dict[str, Any]:
    """Return the arguments of a call as an object, as chat templates want it; other text becomes its only value."""
    if isinstance(given, dict):
        return given
    if not isinstance(given, str) or not given.strip():
        return {}
    try:
        found = decode_json(given)
    except msgspec.DecodeError:
        found = given
    return found if isinstance(found, dict) else {"arguments": found}


def extended_digest(before: bytes, message: Mapping[str, Any]) -> bytes:
    """Return the digest of a conversation that one more message follows."""
    return xxhash.xxh3_128_digest(before + _digest(message))


def _digest(message: Mapping[str, Any]) -> bytes:
    return xxhash.xxh3_128_digest(_encoder.encode(_told_apart_by(message)))


def _told_apart_by(message: Mapping[str, Any]) -> Any:
    if message["role"] != "assistant":
        return message
    calls = [
        # numbers that are equal are written alike
        (call["function"]["name"], json.dumps(call["function"]["arguments"], sort_keys=True))
        for call in message.get("tool_calls", ())
    ]
    return ["assistant", message["content"].strip(), calls]


_encoder = msgspec.json.Encoder(order="deterministic")


def unfollowed(request: ChatCompletionRequest | TokenSampling, recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a request asks for and does not get, because the recipe says how tokens are sampled.

    Parameters
    ----------
    recipe:
        Values of the recipe, and those that ask for nothing, by field.
    """
    # most programs ask for nothing, or for the same at each turn
    asked = {name: value for name in _sampling_fields(type(request)) if (value := getattr(request, name)) is not None}
    if isinstance(asked.get("stop"), str):
        asked["stop"] = [asked["stop"]]
    return {name: value for name, value in asked.items() if value != recipe.get(name, _NEUTRAL.get(name))}


@cache
def _sampling_fields(kind: type[ChatCompletionRequest] | type[TokenSampling]) -> tuple[str, ...]:
    return tuple(name for name in kind.__struct_fields__ if name in _SAMPLING)


_SAMPLING = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "max_tokens", "max_completion_tokens"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "tool_choice"),
        *("parallel_tool_calls", "response_format", "reasoning_effort", "chat_template_kwargs"),
    }
)
_NEUTRAL: dict[str, Any] = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": {},
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "chat_template_kwargs": {},
    "stop": [],
}
