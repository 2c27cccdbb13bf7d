"""Where a template leaves earlier thinking out: the conversation branches where thinking is cut, else it goes on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from family_lab import FAMILIES, TOOLS, needs_templates, write_family
from harness import make_recipe
from start_models import TINY_CONFIG

from hpcrl.models.chat_template import ChatTemplateError
from hpcrl.models.tokenizer import ChatTokenizer, Message
from hpcrl.rollouts.environments import ToolCall, tool_message
from hpcrl.rollouts.rendering import Parsed, Renderer
from hpcrl.rollouts.rendering.trial import check_chat

pytestmark = needs_templates

USER: Message = {"role": "user", "content": "What is the weather in Paris?"}
CALL = ToolCall("weather", {"city": "Paris"}, "functions.weather:0")
RESULT = tool_message(CALL, "grey")
THINKS = ("GLM-4.5", "GLM-5", "Qwen3", "Qwen3.5", "Nemotron-3", "MiniMax-M2", "gpt-oss")


def write_thinking(name: str, path: Path) -> Path:
    return write_family(path, FAMILIES[name])


def thinking_stays(path: Path, turn: dict[str, Any], follows: Sequence[Message], **variables: Any) -> bool:
    """Whether the family's own template, rendering the whole conversation, has the thinking of an earlier turn."""
    whole = ChatTokenizer(path).render([USER, turn, *follows], add_generation_prompt=True, tools=TOOLS, **variables)
    return "a deep thought" in whole


@pytest.mark.parametrize("name", THINKS)
@pytest.mark.parametrize("follows", ["a question", "a result"])
def test_a_branch_is_where_the_whole_has_no_thinking(name: str, follows: str, tmp_path: Path) -> None:
    path = write_thinking(name, tmp_path)
    kept, cut = (Renderer.of_model(path, thinking=thinking) for thinking in ("kept", "cut"))
    turn: dict[str, Any] = {"role": "assistant", "content": "Grey.", "reasoning_content": "a deep thought"}
    messages, calls = [USER], []
    if follows == "a result":
        made = {"name": CALL.name, "arguments": dict(CALL.arguments)}
        turn |= {"content": "", "tool_calls": [{"id": CALL.id, "type": "function", "function": made}]}
        messages, calls = [RESULT], [CALL]
    asked: dict[str, Any] = {"ended_by": kept.stop_token_ids[0], "calls": calls, "tools": TOOLS}
    whole = kept.extension(messages, thought=True, **asked)
    assert whole is not None
    stays = thinking_stays(path, turn, messages)
    assert stays == (follows == "a result")
    assert cut.extension(messages, thought=True, **asked) == (whole if stays else None)
    # nothing is left out of turns without thinking
    assert cut.extension(messages, thought=False, **asked) == whole


@pytest.mark.parametrize("name", ["DeepSeek-V3.1", "Kimi-K2", "Llama-3.1"])
def test_a_template_that_never_writes_thinking_branches_at_once(name: str, tmp_path: Path) -> None:
    renderer = Renderer.of_model(write_thinking(name, tmp_path), thinking="cut")
    ended_by = renderer.stop_token_ids[0]
    assert renderer.extension([USER], ended_by=ended_by, thought=True) is None
    assert renderer.extension([USER], ended_by=ended_by) is not None


def test_a_variable_of_the_template_keeps_thinking(tmp_path: Path) -> None:
    path = write_thinking("GLM-5", tmp_path)
    turn = {"role": "assistant", "content": "Grey.", "reasoning_content": "a deep thought"}
    for clears in (True, False):
        renderer = Renderer.of_model(path, thinking="cut", variables={"clear_thinking": clears})
        extension = renderer.extension([USER], ended_by=renderer.stop_token_ids[0], thought=True)
        assert (extension is None) == clears == (not thinking_stays(path, turn, [USER], clear_thinking=clears))


def test_a_result_without_a_call_before_it(tmp_path: Path) -> None:
    renderer = Renderer.of_model(write_thinking("MiniMax-M2", tmp_path), thinking="cut")
    assert renderer.extension([RESULT], ended_by=renderer.stop_token_ids[0], thought=True) is not None
    with pytest.raises(ChatTemplateError):
        renderer.extension([USER, RESULT], ended_by=renderer.stop_token_ids[0], thought=True)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_whole_conversation_is_what_the_template_writes(name: str, tmp_path: Path) -> None:
    """Of turns that were sampled: text, thinking, calls with their arguments, and a call that could not be run."""
    path = write_thinking(name, tmp_path)
    renderer, tokenizer = Renderer.of_model(path, thinking="cut"), ChatTokenizer(path)
    bad = ToolCall("weather", {}, "functions.weather:1", status="invalid_json", raw="<tool_call>{Pa</tool_call>")
    turns = [
        Parsed("I look.", "a deep thought", (CALL,)),
        Parsed("", "a second thought", (bad,)),
        Parsed("It is grey.", "a third thought"),
    ]
    first, second, third = (renderer.message_of(turn) for turn in turns)
    messages = [USER, first, RESULT, second, tool_message(bad, "no JSON"), third, USER]
    whole = renderer.whole(messages, tools=TOOLS)
    text = tokenizer.decode(whole.token_ids, skip_special_tokens=False)
    assert whole.thinking == any(thought in text for thought in ("a deep thought", "a second", "a third thought"))
    assert "It is grey." in text
    assert text.count("Paris") == 3  # the question twice, and the call
    # arguments were written once, and not as text within text
    assert '\\"city' not in text
    # what was called in control tokens and cannot be run is text now, where the template writes text beside calls
    assert ("{Pa" in text) == (name not in ("DeepSeek-V3", "Llama-3.1", "gpt-oss"))
    marks = [token for mark in ("<tool_call>", "</tool_call>") if (token := tokenizer.id_of(mark)) is not None]
    plain = renderer.whole([*messages[:3], renderer.message_of(Parsed("", "", (bad,)))], tools=TOOLS)
    without = renderer.whole([*messages[:3], {**second, "content": ""}], tools=TOOLS)
    counts = [[each.token_ids.count(token) for token in marks] for each in (plain, without)]
    assert counts[0] == counts[1]


def test_the_problem_is_reported_before_a_submit(tmp_path: Path) -> None:
    path = write_thinking("Qwen3", tmp_path)
    (path / "config.json").write_text(json.dumps({**TINY_CONFIG, "vocab_size": 2000, "model_type": "qwen3"}))
    own = [{"name": "mine", "kind": "custom", "factory": "my_module:Mine", "try_before_submit": False}]
    sums = [{"name": "sums", "kind": "calculator"}]

    def said(environments: list[dict[str, Any]], **chat: Any) -> tuple[list[Any], list[str]]:
        answer = check_chat(make_recipe(path, model={"path": str(path), "chat": chat}, environments=environments), path)
        return answer["findings"], answer["notes"]

    assert said([*own, *sums]) == ([], [])
    findings, (note,) = said([*own, *sums], thinking="cut")
    assert findings == []
    assert "rollouts of environment 'mine' branch at each, and may have 16 sequences" in note
    assert said(sums, thinking="cut") == ([], [])
    assert said(own, thinking="cut", variables={}, format="text") == ([], [])
