"""Schemas of tools that are prepared once: each rendering is as without that."""

from __future__ import annotations

import copy
from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
from chat_lab import TALKS, TOOLS, spelled, write_model
from family_templates import FAMILIES

from hpcrl.models import tokenizer as tokenizer_module
from hpcrl.models.chat_template import ChatTemplateError
from hpcrl.models.tokenizer import ChatTokenizer

#: a text of it is in a control token, so that it is marked
SPELLED = spelled({"tools": TOOLS}, "<|im_end|>")["tools"]
WRITES = "{% for m in messages %}<|im_start|>{{ m.content }}{{ tools | tojson(sort_keys=true) }}<|im_end|>{% endfor %}"


def rendered(tokenizer: ChatTokenizer, talk: dict[str, Any]) -> Any:
    """Return the text and the ids, or the words of a refusal."""
    try:
        found = tokenizer.render_marked(**copy.deepcopy(talk), add_generation_prompt=True)
    except ChatTemplateError as error:
        return str(error)
    return found.text, tokenizer.encode_rendered(found)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_rendering_is_that_of_tools_that_are_not_kept(family: str, tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(write_model(tmp_path, FAMILIES[family]))
    talks = [
        {**talk, "tools": tools}
        for talk in (TALKS["one"], TALKS["calls"], TALKS["two results"], spelled(TALKS["calls"], "<|im_end|>"))
        for tools in (TOOLS, SPELLED, [*TOOLS, *SPELLED], [], None)
    ]
    # other types than Python's own are not kept
    unknown = [{**talk, "tools": talk["tools"] and [*map(UserDict, talk["tools"])]} for talk in talks]
    right = [rendered(tokenizer, talk) for talk in unknown]
    for _ in range(2):
        assert [rendered(tokenizer, talk) for talk in talks] == right


def test_nothing_but_the_first_rendering_copies_and_searches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of tools with a text that is marked."""
    tokenizer = ChatTokenizer(write_model(tmp_path, WRITES))
    talk = {"messages": [{"role": "user", "content": "hello"}], "tools": SPELLED}
    first = rendered(tokenizer, talk)
    seen: list[Any] = []
    plain = tokenizer_module.plain_data
    monkeypatch.setattr(tokenizer_module, "plain_data", lambda value, *rest: seen.append(value) or plain(value, *rest))
    assert rendered(tokenizer, talk) == first
    assert seen
    assert SPELLED not in seen
    assert first[0].count("<|im_end|>") > 1
    assert first[1].count(tokenizer.id_of("<|im_end|>")) == 1


def test_tools_that_change_are_prepared_anew(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(write_model(tmp_path, WRITES + "{{ tools }}"))
    messages = [{"role": "user", "content": ""}]
    tools: list[Any] = [{"name": "one", "n": 1}]
    found = []
    for value in (1, 1.0, True, "1", [1], (1,)):
        tools[0]["n"] = value
        found.append(tokenizer.render(messages, tools=tools, add_generation_prompt=False))
    assert len(set(found)) == 6
    assert "(1,)" in found[-1]


def test_a_message_with_a_substitute_of_tools_stays_as_it_is(tmp_path: Path) -> None:
    """The characters that stand for those of tools are chosen without knowing the messages."""
    tokenizer = ChatTokenizer(write_model(tmp_path, WRITES))
    for content in ("hello", "".join(map(chr, range(0xF0000, 0xF0040)))):
        talk = {"messages": [{"role": "user", "content": content}], "tools": SPELLED}
        text, ids = rendered(tokenizer, talk)
        assert text.startswith(f"<|im_start|>{content}[")
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert ids.count(tokenizer.id_of("<|im_end|>")) == 1
