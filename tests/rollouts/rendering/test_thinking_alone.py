"""Published models that think, and whose tool calls have no known format: their thinking is not their answer."""

from __future__ import annotations

from pathlib import Path

import pytest
from family_lab import LLAMA_CPP, TRL, Family, needs_templates, write_family

from hpcrl.rollouts.rendering import Renderer

pytestmark = needs_templates

_ENDS = ("<|begin|>", "<｜end▁of▁sentence｜>")
_QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
_THINK = ("<think>", "</think>")
MODELS = {
    "QwQ": Family("qwen2.5", "qwen2", f"{LLAMA_CPP}/Qwen-QwQ-32B", (*_QWEN, *_THINK), _QWEN[2], _QWEN[2:3]),
    "R1-Distill-Qwen": Family("", "qwen2", f"{TRL}/deepseek_r1_distill", (*_ENDS, *_THINK), _ENDS[1], _ENDS[1:]),
    "R1-Distill-Llama": Family("", "llama", f"{TRL}/deepseek_r1_distill", (*_ENDS, *_THINK), _ENDS[1], _ENDS[1:]),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("said", "text", "thinking"),
    [
        ("7 or 8? 8.\n</think>\n\n8 apples", "8 apples", "7 or 8? 8."),
        ("<think>\n7?\n</think>\n\n8 apples", "8 apples", "7?"),
        # cut at a limit: there is no answer yet
        ("is it 7, or 8", "", "is it 7, or 8"),
        ("</think>8", "8", ""),
    ],
)
def test_thinking_is_not_the_answer(name: str, said: str, text: str, thinking: str, tmp_path: Path) -> None:
    # the template of llama.cpp has a variable that QwQ's own does not have
    renderer = Renderer.of_model(write_family(tmp_path, MODELS[name]), variables={"enable_thinking": True})
    assert (renderer.format or "") == MODELS[name].chat_format
    opening = renderer.opening([{"role": "user", "content": "How many?"}])
    assert renderer.full_text(opening).rstrip().endswith("<think>")
    parsed = renderer.parse([*renderer.ids_of_text(said), renderer.stop_token_ids[0]], said=opening)
    assert (parsed.text, parsed.thinking.strip(), parsed.calls) == (text, thinking, ())


def test_calls_behind_thinking_keep_their_place(tmp_path: Path) -> None:
    renderer = Renderer.of_model(write_family(tmp_path, MODELS["QwQ"]), variables={"enable_thinking": True})
    written = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    said = renderer.ids_of_text(f"hm <tool_call> no</think>Let me see. {written}<|im_end|>")
    parsed = renderer.parse(said, said=renderer.opening([{"role": "user", "content": "How many?"}]))
    (call,) = parsed.calls
    assert (parsed.text, call.name, call.status) == ("Let me see.", "add", "ok")
    begin, end = call.span or (0, 0)
    assert renderer.full_text(said[begin:end]) == written


def test_the_format_text_keeps_a_turn_whole(tmp_path: Path) -> None:
    path = write_family(tmp_path, MODELS["R1-Distill-Qwen"])
    whole, found = Renderer.of_model(path, chat_format="text"), Renderer.of_model(path)
    assert whole.parse(whole.ids_of_text("a<think>b")).thinking == ""
    # thinking before the turn is closed
    parsed = found.parse(found.ids_of_text(" no thought"), said=found.ids_of_text("<think>x</think>"))
    assert (parsed.text, parsed.thinking) == (" no thought", "")
