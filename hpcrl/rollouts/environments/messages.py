"""Checks messages and tools of environments where they come in: templates of strangers read them next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from hpcrl.rollouts.environments.base import Message, Tool

_ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_LEVELS = 100
"""Maximum nesting of a message, a tool or the arguments of a call. Code that copies or renders them is recursive."""


def plain_messages(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Return messages as plain data.

    Raises
    ------
    TypeError, ValueError
        One is not a message; the text says which, and what is wrong with it.
    """
    return [_plain(message, f"message {i}", _message_problem) for i, message in enumerate(messages)]


def plain_tools(tools: Iterable[Tool]) -> list[dict[str, Any]]:
    """Return tools as plain data.

    Raises
    ------
    TypeError, ValueError
        One is not a tool; the text says which, and what is wrong with it.
    """
    return [_plain(tool, f"tool {i}", _tool_problem) for i, tool in enumerate(tools)]


def _plain(given: Any, what: str, problem_of: Any) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise TypeError(f"{what} is {type(given).__name__}, not a mapping")
    found = dict(given)
    if problem := problem_of(found):
        raise ValueError(f"{what}: {problem}")
    try:
        # values that cannot be encoded, such as integers beyond 64 bits, are unusable for a template as well
        msgspec.msgpack.encode(found)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"{what} is not plain data: {error}") from None
    if is_nested_deeper(found, MAX_LEVELS):
        raise ValueError(f"{what} is nested deeper than {MAX_LEVELS} levels")
    return found


def is_nested_deeper(value: Any, levels: int) -> bool:
    """Return whether plain data has more than ``levels`` objects and lists within each other."""
    level: list[Any] = [value]
    for _ in range(levels + 1):
        level = [each for each in level if isinstance(each, Mapping | list | tuple)]
        if not level:
            return False
        level = [item for each in level for item in (each.values() if isinstance(each, Mapping) else each)]
    return True


def _message_problem(message: Mapping[str, Any]) -> str:
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        return f"its role is {role!r}; roles are {', '.join(_ROLES)}"
    if content is None and message.get("tool_calls"):
        return ""
    if isinstance(content, str):
        return ""
    if isinstance(content, Sequence) and all(isinstance(part, Mapping) and "type" in part for part in content):
        return ""
    return f"its content is {type(content).__name__}, not text"


def _tool_problem(tool: Mapping[str, Any]) -> str:
    function = tool.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        return "it is not {'type': 'function', 'function': {'name': ..., 'parameters': ...}}"
    return ""
