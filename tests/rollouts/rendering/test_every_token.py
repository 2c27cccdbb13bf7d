"""No added token of a family becomes a control token in any field of a conversation."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_lab import spelled
from family_lab import FAMILIES, TOOLS, needs_templates, write_family

from hpcrl.models.tokenizer import ChatTokenizer
from hpcrl.models.tokenizer_files import read_tokenizer_files

pytestmark = needs_templates

Change = Callable[[str], None]


def conversation() -> dict[str, Any]:
    call = {"id": "functions.weather:0", "type": "function"}
    arguments = {"city": "Paris", "more": ["a", {"deep": "b"}]}
    asks = {"role": "assistant", "content": "I look.", "reasoning_content": "Let me think."}
    asks["tool_calls"] = [{**call, "function": {"name": "weather", "arguments": arguments}}]  # type: ignore[assignment]
    result = {"role": "tool", "tool_call_id": call["id"], "name": "weather", "content": "grey"}
    return {
        "messages": [
            {"role": "system", "content": "You are terse."},
            {"role": "user", "content": "What is the weather?"},
            asks,
            result,
            {"role": "assistant", "content": "Grey.", "reasoning_content": "So it is."},
            {"role": "user", "content": "Sure?"},
            {**asks, "content": ""},
            result,
        ],
        "tools": copy.deepcopy(TOOLS),
    }


@pytest.mark.parametrize("name", FAMILIES)
def test_every_added_token_in_every_field(name: str, tmp_path: Path) -> None:
    path = write_family(tmp_path, FAMILIES[name])
    tokenizer = ChatTokenizer(path)
    added = {
        number: token.content
        for number, token in read_tokenizer_files(path).tokenizer.get_added_tokens_decoder().items()
    }
    control = tokenizer.control_ids

    def controls(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[str]:
        ids = tokenizer.render_ids(messages, tools=tools, add_generation_prompt=True)
        return [added[number] for number in ids if number in control]

    talk = conversation()
    if name == "gpt-oss":
        # its template takes text or thinking beside a call, not both
        for message in talk["messages"]:
            if message.get("tool_calls"):
                del message["content"]
    if name == "DeepSeek-V3":
        # its template joins arguments as text
        for message in talk["messages"]:
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = '{"city": "Paris"}'
    clean = controls(**talk)
    assert clean
    tokens = [token for number, token in added.items() if number in control]
    assert set(FAMILIES[name].tokens) <= set(tokens)
    for token in tokens:
        everywhere = spelled(talk, f"a{token}b")
        assert token in str(everywhere)
        assert controls(**everywhere) == clean, token
