"""Conversations and tools in the columns of a row."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from typing import Any

import msgspec

from hpcrl.rollouts.environments.dataset.problems import BadRowError, shown
from hpcrl.rollouts.environments.messages import MAX_LEVELS, is_nested_deeper, plain_messages, plain_tools

_ROLES = ("system", "developer", "user", "assistant", "tool")
_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")


def read_conversation(value: Any, column: str) -> list[dict[str, Any]]:
    """Return the conversation of a row, which the policy continues (`BadRowError` with the first mistake)."""
    found = _objects(value, column, "messages", '[{"role": "user", "content": "..."}]')
    messages = [_message(each, f"message {n} of column {column!r}") for n, each in enumerate(found, 1)]
    if messages[-1]["role"] not in ("user", "tool"):
        what = f"the last message of column {column!r} is of {messages[-1]['role']!r}"
        raise BadRowError(what, "end with the question of the user; the answer has a column of its own")
    try:
        return plain_messages(messages)
    except (TypeError, ValueError) as error:
        raise BadRowError(f"column {column!r}: {error}", "write messages as OpenAI's API has them") from None


def read_tools(value: Any, column: str) -> list[dict[str, Any]]:
    """Return the tools of a row; none where the column is empty."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return []
    form = '[{"type": "function", "function": {"name": "...", "parameters": {...}}}]'
    found = _objects(value, column, "tools", form, may_be_empty=True)
    if not isinstance(value, str):
        found = _deeply_without_null(found)
    try:
        tools = plain_tools(found)
    except (TypeError, ValueError) as error:
        raise BadRowError(f"column {column!r}: {error}", f"write {form}") from None
    names = [tool["function"]["name"] for tool in tools]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise BadRowError(f"column {column!r} has two tools {twice[0]!r}", "give each tool a name of its own")
    return tools


def question_of(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
    """Return a text that equal conversations with equal tools have in common."""
    parts = []
    for message in messages:
        calls = message.get("tool_calls")
        more = (msgspec.json.encode(calls, order="deterministic").decode(),) if calls else ()
        parts.append("\0".join((message["role"], normal_text(message["content"] or ""), *more)))
    if tools:
        parts.append(msgspec.json.encode(tools, order="deterministic").decode())
    return "\0".join(parts)


def normal_text(text: str) -> str:
    """Return a text in Unicode's form NFC, each run of whitespace as one blank."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def _objects(value: Any, column: str, noun: str, form: str, *, may_be_empty: bool = False) -> list[Any]:
    """Return a list as it is, or the one that a text has as JSON."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
            raise BadRowError(f"column {column!r} is text, and no JSON list", f"give a list of {noun}") from None
    if not isinstance(value, list | tuple) or not (value or may_be_empty):
        raise BadRowError(f"column {column!r} is not a list of {noun}", f"give {form}")
    if is_nested_deeper(value, MAX_LEVELS):
        raise BadRowError(f"column {column!r} is nested deeper than {MAX_LEVELS} levels", f"give {form}")
    return list(value)


def _message(given: Any, where: str) -> dict[str, Any]:
    """Check one message of a conversation."""
    if not isinstance(given, Mapping):
        raise BadRowError(f"{where} is not a mapping: {shown(given)}", "give role and content")
    value = _without_null(given)
    role, content = value.get("role"), value.setdefault("content", None)
    if role not in _ROLES:
        raise BadRowError(f"{where} has the role {shown(role)}", f"roles are {', '.join(_ROLES)}")
    if more := [key for key in value if key not in _KEYS]:
        raise BadRowError(f"{where} has {shown(more[0])}", f"remove it; {', '.join(_KEYS)} are read")
    calls = value.get("tool_calls")
    if calls is not None:
        if role != "assistant" or not isinstance(calls, list | tuple) or not calls:
            raise BadRowError(
                f"{where} has tool_calls that are {shown(calls)}", "only the assistant has a list of calls"
            )
        value["tool_calls"] = [_call(each, where) for each in calls]
    if content is None and calls:
        value["content"] = ""
    elif role == "tool" and isinstance(content, str):
        pass  # a tool may print nothing
    elif not isinstance(content, str) or not (content.strip() or calls):
        raise BadRowError(f"{where} has no text: {shown(content)}", "content is text")
    return value


def _call(given: Any, where: str) -> dict[str, Any]:
    """Return a call of a message, its arguments as a mapping."""
    function = given.get("function") if isinstance(given, Mapping) else None
    hint = 'write {"function": {"name": "...", "arguments": {...}}}'
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise BadRowError(f"{where} has a call without the name of a function: {shown(given)}", hint)
    arguments = decoded_arguments(function.get("arguments"))
    if arguments is None:
        what = f"{where} has a call whose arguments are no JSON object: {shown(function.get('arguments'))}"
        raise BadRowError(what, hint)
    call = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {**call, "id": given["id"]} if isinstance(given.get("id"), str) else call


def decoded_arguments(given: Any) -> dict[str, Any] | None:
    """Return arguments that are a mapping, or JSON text of one; None where they are neither. Nothing is no argument."""
    if given is None:
        return {}
    if isinstance(given, str):
        try:
            given = msgspec.json.decode(given)
        except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
            return None
        return given if isinstance(given, dict) else None
    return _without_null(given) if isinstance(given, Mapping) else None


def _without_null(given: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a mapping without keys that are null: tables have each key in each row."""
    return {str(key): each for key, each in given.items() if each is not None}


def _deeply_without_null(given: Any) -> Any:
    """Return tools without keys that are null: a table gives each tool the parameters of all others."""
    if isinstance(given, Mapping):
        return {str(key): _deeply_without_null(each) for key, each in given.items() if each is not None}
    return [_deeply_without_null(each) for each in given] if isinstance(given, list | tuple) else given
