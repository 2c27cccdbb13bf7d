"""Messages and tools of environments are checked before a chat template reads them."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest

from hpcrl.models.chat_template import plain_data
from hpcrl.rollouts.environments.messages import plain_messages, plain_tools

GOOD = {"role": "user", "content": "hello"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": [1, None, "x"]}}}


def nested(levels: int) -> Any:
    """Lists and objects within each other."""
    value: Any = "x"
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value


def test_messages_come_out_as_plain_data() -> None:
    messages = [
        MappingProxyType(GOOD),
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
        {"role": "tool", "content": [{"type": "text", "text": "one"}], "tool_call_id": "1", "name": "f"},
        {"role": "developer", "content": ""},
    ]
    made = plain_messages(messages)
    assert made == [dict(message) for message in messages]
    assert all(type(message) is dict for message in made)


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ("hello", "message 1 is str, not a mapping"),
        (None, "message 1 is NoneType, not a mapping"),
        ({}, "message 1: its role is None"),
        ({"role": "robot", "content": ""}, "message 1: its role is 'robot'"),
        ({"role": "user"}, "message 1: its content is NoneType, not text"),
        ({"role": "user", "content": 7}, "message 1: its content is int, not text"),
        ({"role": "user", "content": b"x"}, "message 1: its content is bytes, not text"),
        ({"role": "user", "content": ["x"]}, "message 1: its content is list, not text"),
        ({"role": "user", "content": [{"text": "x"}]}, "message 1: its content is list, not text"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "message 1: its content is NoneType"),
        ({**GOOD, "more": object()}, "message 1 is not plain data"),
        ({**GOOD, "more": 1 << 70}, "message 1 is not plain data"),
        ({**GOOD, "content": "\ud800"}, "message 1 is not plain data"),
        ({**GOOD, "more": nested(100)}, "message 1 is nested deeper than 100 levels"),
        ({**GOOD, "more": nested(600)}, "message 1 is nested deeper than 100 levels"),
    ],
)
def test_what_is_not_a_message_is_named(message: Any, problem: str) -> None:
    with pytest.raises((TypeError, ValueError), match=problem):
        plain_messages([GOOD, message])


@pytest.mark.parametrize("tool", [{}, {"function": None}, {"function": {}}, {"function": {"name": ""}}, {"name": "f"}])
def test_what_is_not_a_tool_is_named(tool: Any) -> None:
    good = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert plain_tools([good]) == [good]
    with pytest.raises(ValueError, match=r"tool 1: it is not \{'type': 'function'"):
        plain_tools([good, tool])


def test_what_is_just_not_too_deep_can_be_copied() -> None:
    (made,) = plain_messages([{**GOOD, "more": nested(99)}])
    assert plain_data(made) == made
    tool = {"type": "function", "function": {"name": "f", "parameters": nested(99)}}
    with pytest.raises(ValueError, match="tool 0 is nested deeper than 100 levels"):
        plain_tools([tool])
