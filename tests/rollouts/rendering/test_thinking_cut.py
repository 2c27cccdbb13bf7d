"""Where a template leaves earlier thinking out: the conversation branches where thinking is cut, and is whole else."""

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
from hpcrl.rollouts.rendering import Renderer
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


def test_it_is_said_before_a_submit(tmp_path: Path) -> None:
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
    assert "a user's message cannot follow a reply; rollouts of environment 'mine' fail" in note
    assert "set model.chat.thinking: kept" in note
    assert said(sums, thinking="cut") == ([], [])
    assert said(own, thinking="cut", variables={}, format="text") == ([], [])
