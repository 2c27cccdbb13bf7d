"""Pieces of conversations are, put together, what the family's own template renders as a whole."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from family_lab import FAMILIES, TOOLS, needs_templates, write_family

from hpcrl.errors import UsageError
from hpcrl.models.character_tokenizer import write_character_tokenizer
from hpcrl.models.tokenizer import ChatTokenizer
from hpcrl.rollouts.environments import Message, ToolCall, malformed_answer, tool_message
from hpcrl.rollouts.rendering import Renderer

pytestmark = needs_templates

USER: Message = {"role": "user", "content": "What is the weather in Paris?"}
#: DeepSeek's template concatenates arguments as text
AS_TEXT = ("DeepSeek-V3",)
#: their generation prompt begins thinking, and their replies without thinking have none
OPENED_THINKING = ("MiniMax-M2",)


class Talk:
    """A conversation that is held piece by piece, and beside it the messages that a template renders as a whole."""

    def __init__(self, path: Path, *, arguments_as_text: bool = False) -> None:
        self.renderer, self.tokenizer = Renderer.of_model(path), ChatTokenizer(path)
        self.messages: list[Message] = [USER]
        self.ids = self.renderer.opening([USER], tools=TOOLS)
        self._as_text = arguments_as_text
        self.turns = 0

    def whole(self, messages: Sequence[Message], *, prompt: bool = True) -> list[int]:
        return self.tokenizer.render_ids(messages, add_generation_prompt=prompt, tools=TOOLS)

    def say(self, text: str, *calls: dict[str, Any], thinking: str = "") -> list[int]:
        """Return the turn of the policy as the template renders it, behind what was said; it ends with an end token."""
        made = [
            {
                "id": f"call_{self.turns}_{i}",
                "type": "function",
                "function": {"name": "weather", "arguments": json.dumps(call) if self._as_text else call},
            }
            for i, call in enumerate(calls)
        ]
        turn: dict[str, Any] = {"role": "assistant", "content": text, **({"tool_calls": made} if made else {})}
        if thinking:
            turn["reasoning_content"] = thinking
        follows: Message = {"role": "user", "content": "?"}
        if made:
            follows = {"role": "tool", "tool_call_id": made[0]["id"], "name": "weather", "content": "?"}
        whole = self.whole([*self.messages, turn, follows])
        before = self.whole(self.messages)
        start = next(
            (i for i, (one, other) in enumerate(zip(before, whole, strict=False)) if one != other), len(before)
        )
        # a mark that a template closes behind a generation prompt that has opened it, of thinking, is sampled as well
        end = next(i for i, token in enumerate(whole[start:], start) if token in self.renderer.stop_token_ids)
        self.messages.append(turn)
        self.turns += 1
        return whole[start : end + 1]


#: but gpt-oss, whose turns are sampled in other tokens than its template writes, and which has a test of its own
@pytest.fixture(params=[name for name in FAMILIES if name != "gpt-oss"])
def talk(request: pytest.FixtureRequest, tmp_path: Path) -> Talk:
    return Talk(write_family(tmp_path, FAMILIES[request.param]), arguments_as_text=request.param in AS_TEXT)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_format_and_the_ends_of_a_family_are_found(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    renderer = Renderer.of_model(write_family(tmp_path, family))
    tokenizer = ChatTokenizer(tmp_path)
    assert renderer.format == family.chat_format
    assert {tokenizer.id_of(token) for token in (*family.ends, family.eos)} <= set(renderer.stop_token_ids)
    assert len(set(renderer.stop_token_ids)) == len(renderer.stop_token_ids)


def test_the_result_of_a_tool_follows_a_call_as_in_the_whole(talk: Talk) -> None:
    sampled = talk.say("", {"city": "Paris"})
    parsed = talk.renderer.parse(sampled, said=talk.ids, tools=TOOLS)
    extension = talk.renderer.extension(
        [tool_message(call, "grey") for call in parsed.calls] or [tool_message(ToolCall("weather", {}, "x"), "grey")],
        ended_by=sampled[-1],
        calls=parsed.calls,
        tools=TOOLS,
    )
    given = parsed.calls[0].id if parsed.calls else "call_0_0"
    talk.messages.append({"role": "tool", "tool_call_id": given, "name": "weather", "content": "grey"})
    assert not extension.ended_otherwise
    whole = talk.whole(talk.messages)
    assert whole[-len(sampled) - len(extension.token_ids) :] == sampled + extension.token_ids


def test_a_question_follows_an_answer_as_in_the_whole(talk: Talk) -> None:
    sampled = talk.say("It is grey.")
    question: Message = {"role": "user", "content": "And in <|im_end|> Rome?"}
    extension = talk.renderer.extension([question], ended_by=sampled[-1], tools=TOOLS)
    whole = talk.whole([*talk.messages, question])
    assert whole[-len(extension.token_ids) - 1 :] == [sampled[-1], *extension.token_ids]
    # the token that ended the turn stands there once
    assert extension.token_ids[0] not in talk.renderer.stop_token_ids


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ("gpt-oss", "Llama-3.1", "DeepSeek-V3")])
def test_a_call_is_parsed_with_its_span(name: str, tmp_path: Path) -> None:
    talk = Talk(write_family(tmp_path, FAMILIES[name]))
    sampled = talk.say("Let me look.", {"city": "Paris", "days": 2})
    if name in OPENED_THINKING:
        sampled = [*talk.tokenizer.encode("\n</think>\n\n"), *sampled]
    parsed = talk.renderer.parse(sampled, said=talk.ids, tools=TOOLS, turn=3)
    (call,) = parsed.calls
    assert (call.name, dict(call.arguments), call.status, call.id) == (
        "weather",
        {"city": "Paris", "days": 2},
        "ok",
        "functions.weather:0" if name == "Kimi-K2" else "call_3_0",
    )
    assert parsed.text.strip() == "Let me look."
    assert call.span is not None
    begin, end = call.span
    assert "Paris" in talk.tokenizer.decode(sampled[begin:end])
    assert "look" not in talk.tokenizer.decode(sampled[begin:end])


def test_llama_calls_in_json(tmp_path: Path) -> None:
    talk = Talk(write_family(tmp_path, FAMILIES["Llama-3.1"]))
    (call,) = talk.renderer.parse(talk.say("", {"city": "Paris"}), tools=TOOLS).calls
    assert (call.name, dict(call.arguments)) == ("weather", {"city": "Paris"})


def test_gpt_oss_thinks_calls_and_answers(tmp_path: Path) -> None:
    talk = Talk(write_family(tmp_path, FAMILIES["gpt-oss"]))
    renderer, tokenizer = talk.renderer, talk.tokenizer
    calls = tokenizer.encode(
        "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant to=functions.weather<|channel|>commentary json"
        '<|message|>{"city": "Paris"}<|call|>'
    )
    parsed = renderer.parse(calls, said=talk.ids, tools=TOOLS)
    (call,) = parsed.calls
    assert (parsed.thinking, parsed.text, call.name, dict(call.arguments)) == (
        "Look.",
        "",
        "weather",
        {"city": "Paris"},
    )
    further = renderer.extension([tool_message(call, "grey")], ended_by=calls[-1], calls=[call], tools=TOOLS)
    assert not further.ended_otherwise
    assert renderer.full_text(further.token_ids) == (
        '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"grey"<|end|><|start|>assistant'
    )
    answer = tokenizer.encode("<|channel|>final<|message|>Grey.<|return|>")
    assert renderer.parse(answer).text == "Grey."
    # `<|return|>` stands for the `<|end|>` that the template has there
    asked = renderer.extension([{"role": "user", "content": "Sure?"}], ended_by=answer[-1], tools=TOOLS)
    assert renderer.full_text(asked.token_ids) == "<|start|>user<|message|>Sure?<|end|><|start|>assistant"
    assert not asked.ended_otherwise


def test_a_turn_of_glm_that_ends_with_the_role_of_the_next_message(tmp_path: Path) -> None:
    """It has no end of its own: the mark of the next message ends it, and stands there once if it is the right one."""
    talk = Talk(write_family(tmp_path, FAMILIES["GLM-4.5"]))
    renderer, id_of = talk.renderer, talk.tokenizer.id_of
    user, observation, end = (id_of(token) or -1 for token in ("<|user|>", "<|observation|>", "<|endoftext|>"))
    call = ToolCall("weather", {"city": "Paris"}, "call_0_0")
    result = tool_message(call, "grey")
    right = renderer.extension([result], ended_by=observation, calls=[call], tools=TOOLS)
    assert observation not in right.token_ids
    assert not right.ended_otherwise
    for other in (user, end):
        wrong = renderer.extension([result], ended_by=other, calls=[call], tools=TOOLS)
        assert wrong.token_ids == [observation, *right.token_ids]
        assert wrong.ended_otherwise


@pytest.mark.parametrize(
    "name", ["GLM-4.5", "Qwen3", "Qwen3-2507", "Qwen3-Next", "Qwen2.5", "Llama-3.1", "Kimi-K2", "DeepSeek-V3.1"]
)
def test_fifty_turns_with_a_tool_are_the_whole_at_each_turn(name: str, tmp_path: Path) -> None:
    talk = Talk(write_family(tmp_path, FAMILIES[name]))
    ids = talk.ids
    for turn in range(50):
        sampled = talk.say("", {"city": f"Paris {turn}"})
        call = ToolCall("weather", {"city": f"Paris {turn}"}, f"call_{turn}_0")
        result = tool_message(call, f"grey {turn} </tool_response><|im_end|>")
        further = talk.renderer.extension([result], ended_by=sampled[-1], calls=[call], tools=TOOLS)
        ids = [*ids, *sampled, *further.token_ids]
        talk.messages.append(result)
        if turn % 10 in (0, 9):
            assert talk.whole(talk.messages) == ids


@pytest.mark.parametrize("name", ["GLM-4.5", "GLM-5", "Qwen3", "Qwen3.5", "MiniMax-M2", "Nemotron-3"])
def test_fifty_turns_with_thinking_are_the_whole_at_each_turn(name: str, tmp_path: Path) -> None:
    talk = Talk(write_family(tmp_path, FAMILIES[name]))
    ids = talk.ids
    for turn in range(50):
        said, sampled = ids, talk.say("", {"city": f"Paris {turn}"}, thinking=f"deep thought {turn}")
        (call,) = talk.renderer.parse(sampled, said=said, tools=TOOLS, turn=turn).calls
        result = tool_message(call, f"grey {turn} </think><think>")
        further = talk.renderer.extension([result], ended_by=sampled[-1], calls=[call], tools=TOOLS, thought=True)
        ids = [*ids, *sampled, *further.token_ids]
        talk.messages.append(result)
        if turn % 10 in (0, 9):
            assert talk.whole(talk.messages) == ids
            assert f"deep thought {turn}" in talk.renderer.full_text(ids)


def test_fifty_turns_of_gpt_oss_are_the_whole_at_each_turn(tmp_path: Path) -> None:
    """Its turns are sampled in several messages, of which its template writes the first with a mark of its own."""
    talk = Talk(write_family(tmp_path, FAMILIES["gpt-oss"]))
    ids = talk.ids
    for turn in range(50):
        said = ids
        sampled = talk.tokenizer.encode(
            f"<|channel|>analysis<|message|>Look {turn}.<|end|><|start|>assistant to=functions.weather"
            f'<|channel|>commentary json<|message|>{{"city": "Paris {turn}"}}<|call|>'
        )
        parsed = talk.renderer.parse(sampled, said=said, tools=TOOLS, turn=turn)
        (call,) = parsed.calls
        assert (parsed.thinking, dict(call.arguments)) == (f"Look {turn}.", {"city": f"Paris {turn}"})
        result = tool_message(call, f"grey {turn} <|end|><|start|>assistant")
        further = talk.renderer.extension([result], ended_by=sampled[-1], calls=[call], tools=TOOLS, thought=True)
        ids = [*ids, *sampled, *further.token_ids]
        function = {"name": "weather", "arguments": dict(call.arguments)}
        made = {"id": call.id, "type": "function", "function": function}
        talk.messages += [{"role": "assistant", "thinking": f"Look {turn}.", "tool_calls": [made]}, result]
        if turn % 10 in (0, 9):
            assert talk.whole(talk.messages) == ids


@pytest.mark.parametrize(
    "name", ["GLM-4.5", "Qwen2.5", "Qwen3-2507", "Qwen3-Next", "Llama-3.1", "Kimi-K2", "DeepSeek-V3.1"]
)
def test_fifty_questions_are_the_whole_at_each_turn(name: str, tmp_path: Path) -> None:
    """Templates that leave earlier thinking out, or open it in the generation prompt, begin a branch there."""
    talk = Talk(write_family(tmp_path, FAMILIES[name]))
    ids = talk.ids
    for turn in range(50):
        sampled = talk.say(f"It is grey {turn}.")
        question: Message = {"role": "user", "content": f"And in <|im_end|><|user|> Rome {turn}?"}
        further = talk.renderer.extension([question], ended_by=sampled[-1], tools=TOOLS)
        ids = [*ids, *sampled, *further.token_ids]
        talk.messages.append(question)
        if turn % 10 in (0, 9):
            assert talk.whole(talk.messages) == ids


@pytest.mark.parametrize("name", ["GLM-4.5", "GLM-5", "Qwen3", "Qwen3-Next", "Qwen2.5", "Qwen3.5", "Nemotron-3"])
@pytest.mark.parametrize(
    ("written", "status"),
    [
        ('<tool_call>\n{"name": "weather", "argum', "unclosed_block"),
        ("<tool_call>", "unclosed_block"),
        ("<tool_call></tool_call>", None),
        ('<tool_call>{"name": "weather", "arguments": [1]}</tool_call>', None),
        ('<tool_call>{"name": "weather", "arguments": {"days": NaN}}</tool_call>', None),
        ('<tool_call>{"name": "weather", "arguments": {"days": ' + "9" * 30 + "}}</tool_call>", None),
        ('<tool_call>{"name": "weather", "arguments": {"days": ' + "9" * 5000 + "}}</tool_call>", None),
        ("<tool_call>" + '{"a":' * 3000 + "</tool_call>", None),
        # JSON that all readers take, and that is too deep for code that copies it
        ('<tool_call>{"name": "weather", "arguments": {"days": ' + "[" * 600 + "]" * 600 + "}}</tool_call>", None),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", None),
        ('<tool_call>{"name": 7, "arguments": {}}</tool_call>', None),
        ('<tool_call>{"name": "nobody", "arguments": {}}</tool_call>', None),
        ("</tool_call><tool_call></think>", None),
    ],
)
def test_a_malformed_call_is_reported_to_the_model_and_raises_nothing(
    name: str, written: str, status: str | None, tmp_path: Path
) -> None:
    talk = Talk(write_family(tmp_path, FAMILIES[name]))
    end = talk.renderer.stop_token_ids[0]
    sampled = [*talk.tokenizer.encode("</think>" * (name in ("Qwen3.5", "Nemotron-3", "GLM-5")) + written), end]
    calls = talk.renderer.parse(sampled, said=talk.ids, tools=TOOLS).calls
    assert calls
    assert all(call.status != "ok" for call in calls)
    if status is not None:
        assert calls[0].status == status
    further = talk.renderer.extension(
        [malformed_answer(call) for call in calls], ended_by=end, calls=calls, tools=TOOLS
    )
    assert "the tool call was not run" in talk.renderer.full_text(further.token_ids)


@pytest.mark.parametrize(
    ("name", "written", "status"),
    [
        ("Kimi-K2", '<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city"', "unclosed_block"),
        ("Kimi-K2", "<|tool_call_begin|>functions.weather:0<|tool_call_end|>", None),
        ("Kimi-K2", "<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{]<|tool_call_end|>", None),
        ("Kimi-K2", "<|tool_call_begin|><|tool_call_argument_begin|>{}<|tool_call_end|>", None),
        (
            "Kimi-K2",
            "<|tool_call_begin|>functions.fly:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
            "unknown_tool",
        ),
        ("MiniMax-M2", '<minimax:tool_call>\n<invoke name="weather">', "unclosed_block"),
        ("MiniMax-M2", '<minimax:tool_call>\n<invoke name="">\n</invoke>\n</minimax:tool_call>', None),
        ("MiniMax-M2", '<minimax:tool_call>\n<invoke name="fly">\n</invoke>\n</minimax:tool_call>', "unknown_tool"),
        ("DeepSeek-V3.1", '<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "P', "unclosed_block"),
        ("DeepSeek-V3.1", '<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "P<｜tool▁call▁end｜>', "invalid_json"),
        ("DeepSeek-V3.1", "<｜tool▁call▁begin｜>weather<｜tool▁call▁end｜>", "malformed_structure"),
        ("DeepSeek-V3.1", "<｜tool▁call▁begin｜><｜tool▁sep｜>{}<｜tool▁call▁end｜>", "missing_name"),
        ("DeepSeek-V3.1", "<｜tool▁call▁begin｜>weather<｜tool▁sep｜>[1]<｜tool▁call▁end｜>", "malformed_structure"),
        ("DeepSeek-V3.1", "<｜tool▁call▁begin｜>fly<｜tool▁sep｜>{}<｜tool▁call▁end｜>", "unknown_tool"),
    ],
)
def test_a_malformed_call_of_other_marks(name: str, written: str, status: str | None, tmp_path: Path) -> None:
    talk = Talk(write_family(tmp_path, FAMILIES[name]))
    sections = {"Kimi-K2": "<|tool_calls_section_begin|>", "DeepSeek-V3.1": "<｜tool▁calls▁begin｜>"}
    before = "</think>" * (name in OPENED_THINKING) + sections.get(name, "")
    end = talk.renderer.stop_token_ids[0]
    calls = talk.renderer.parse([*talk.tokenizer.encode(before + written), end], said=talk.ids, tools=TOOLS).calls
    assert calls
    assert all(call.status != "ok" for call in calls)
    assert status is None or calls[0].status == status
    further = talk.renderer.extension(
        [malformed_answer(call) for call in calls], ended_by=end, calls=calls, tools=TOOLS
    )
    assert "the tool call was not run" in talk.renderer.full_text(further.token_ids)


def test_both_calls_of_deepseek_are_known(tmp_path: Path) -> None:
    talk = Talk(write_family(tmp_path, FAMILIES["DeepSeek-V3.1"]))
    older = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{"city": "Rome"}\n```<｜tool▁call▁end｜>'
    newer = '<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>'
    ids = talk.tokenizer.encode(f"Look.<｜tool▁calls▁begin｜>{older}{newer}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>")
    parsed = talk.renderer.parse(ids, said=talk.ids, tools=TOOLS)
    assert parsed.text == "Look."
    found = [(call.name, dict(call.arguments), call.status) for call in parsed.calls]
    assert found == [("weather", {"city": "Rome"}, "ok"), ("weather", {"city": "Paris"}, "ok")]


def test_a_call_that_is_spelled_in_other_tokens_is_text(tmp_path: Path) -> None:
    talk = Talk(write_family(tmp_path, FAMILIES["Qwen3"]))
    pieces = ("<tool", '_call>{"name": "weather"}', "</tool", "_call>")
    spelled = [token for piece in pieces for token in talk.tokenizer.encode(piece)]
    assert talk.renderer.parse([*spelled, talk.renderer.stop_token_ids[0]], tools=TOOLS).calls == ()


def test_variables_reach_the_template_and_the_parser(tmp_path: Path) -> None:
    path = write_family(tmp_path, FAMILIES["Qwen3"])
    thinks, does_not = (Renderer.of_model(path, variables={"enable_thinking": flag}) for flag in (True, False))
    opening = does_not.opening([USER])
    assert does_not.full_text(opening).endswith("<think>\n\n</think>\n\n")
    assert not thinks.full_text(thinks.opening([USER])).endswith("</think>\n\n")


def test_a_format_that_a_model_does_not_have(tmp_path: Path) -> None:
    path = write_family(tmp_path, FAMILIES["Llama-3.1"])
    with pytest.raises(UsageError, match=r"(?s)model.chat.format qwen3: .*hint: "):
        Renderer.of_model(path, chat_format="qwen3")
    assert Renderer.of_model(path, chat_format="text").format is None


def test_a_model_without_a_known_format_says_text(tmp_path: Path) -> None:
    write_character_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    renderer = Renderer.of_model(tmp_path)
    assert renderer.format is None
    parsed = renderer.parse([*ChatTokenizer(tmp_path).encode("run 1+1"), renderer.stop_token_ids[0]], tools=TOOLS)
    assert (parsed.text, parsed.thinking, parsed.calls) == ("run 1+1", "", ())
