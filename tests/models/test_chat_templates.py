"""Chat templates give the text and the token ids that transformers gives, for every template and conversation."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from chat_lab import TALKS, oracle, piece_tokenizer, ways, write_model
from family_templates import FAMILIES

from hpcrl.models.character_tokenizer import write_character_tokenizer
from hpcrl.models.chat_template import ChatTemplateError
from hpcrl.models.tokenizer import ChatTokenizer

PUBLISHED = Path(__file__).parents[2] / ".chat-templates"
FILES = sorted((*PUBLISHED.glob("trl/chat_templates/*.jinja"), *PUBLISHED.glob("llama.cpp/*.jinja")))
BASE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
TALK = [{"role": "user", "content": "it's <b> & 1"}]


def assert_as_transformers(path: Path) -> int:
    """Compare all conversations; return how many were rendered."""
    ours, theirs, rendered = ChatTokenizer(path), oracle(path), 0
    for talk in TALKS.values():
        for way in ways(talk):
            try:
                text = theirs.apply_chat_template(way["messages"], tokenize=False, **without_messages(way))
            except Exception:  # noqa: BLE001 - whatever it is, ours has to say it in order
                with pytest.raises(ChatTemplateError):
                    ours.render(**way)
                continue
            rendered += 1
            assert ours.render(**way) == text
            ids = theirs.apply_chat_template(way["messages"], return_dict=False, **without_messages(way))
            assert ours.render_ids(**way) == ids
    return rendered


def without_messages(way: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in way.items() if key != "messages"}


@pytest.mark.parametrize("family", FAMILIES)
def test_templates_like_those_of_families(family: str, tmp_path: Path) -> None:
    assert assert_as_transformers(write_model(tmp_path, FAMILIES[family])) >= 10


@pytest.mark.parametrize("family", ["brackets", "marked turns"])
def test_a_tokenizer_that_begins_a_text_with_a_blank(family: str, tmp_path: Path) -> None:
    assert assert_as_transformers(write_model(tmp_path, FAMILIES[family], piece_tokenizer())) >= 10


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="no published templates: python3 tools/bootstrap.py --templates")
def test_there_are_published_templates() -> None:
    assert len(FILES) > 120


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="no published templates: python3 tools/bootstrap.py --templates")
def test_small_models_of_glm_speak_as_the_family_does(tmp_path: Path) -> None:
    """Turns with thinking and calls, and both beginnings of a reply, against the template that llama.cpp publishes."""
    write_character_tokenizer(tmp_path / "small", chat="glm-5")
    small = ChatTokenizer(tmp_path / "small")
    published = write_model(tmp_path / "published", (PUBLISHED / "llama.cpp/GLM-4.7-Flash.jinja").read_text())
    family = ChatTokenizer(published)
    call = {"type": "function", "function": {"name": "bash", "arguments": {"command": "cat a.py", "lines": 3}}}
    talk: list[dict[str, Any]] = [
        {"role": "system", "content": "mend"},
        {"role": "user", "content": "mend a.py"},
        {"role": "assistant", "content": "", "reasoning_content": "look", "tool_calls": [call, call]},
        {"role": "tool", "content": "one"},
        {"role": "tool", "content": "two"},
        {"role": "assistant", "content": "done", "reasoning_content": "done"},
    ]
    for end in range(1, len(talk) + 1):
        for variables in ({}, {"enable_thinking": False}):
            way: dict[str, Any] = {"add_generation_prompt": talk[end - 1]["role"] != "assistant", **variables}
            assert small.render(talk[:end], **way) == family.render(talk[:end], **way)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_published_templates(path: Path, tmp_path: Path) -> None:
    # firefunction's wants variables that nobody gives it
    least = 0 if "firefunction" in path.stem else 6
    assert assert_as_transformers(write_model(tmp_path, path.read_text(encoding="utf-8"))) >= least


@pytest.mark.parametrize(
    "piece",
    [
        "{{ bos_token }}{{ eos_token }}{{ pad_token is defined }}{{ unk_token }}",
        "{{ tools is none }}{{ documents is none }}{{ tools is defined }}",
        "{{ {'b': '<ä>', 'a': [1, 2.5, none, true]} | tojson }}",
        "{{ {'b': '<ä>\\x7f😀', 'a': 1} | tojson(ensure_ascii=True, sort_keys=true) }}",
        "{{ {'b': [1], 'a': {}} | tojson(indent=2, separators=(',', '=')) }}",
        "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i == 5 %}{% break %}{% endif %}{{ i }}"
        "{% endfor %}",
        "{% generation %}said{% endgeneration %}",
        "{% set ns = namespace(a=1) %}{% set ns.a = 2 %}{{ ns.a }}{{ dict(a=1) }}{{ dict.fromkeys(['x'], 3) }}",
        "  {% if true %}\n  x\n  {% endif %}\n{# no #}\ny",
        "{{ messages[0].content | upper | trim ~ messages[0].content[2:5] }}",
        "{{ ['a', 'b'] | join('-') }}{{ messages | map(attribute='role') | join(', ') }}",
        "{{ messages | join('|', 'role') }}",
        "{{ undefined_name }}{{ messages[0].absent }}{{ messages[0].get('absent', 'no') }}",
        "{{ add_generation_prompt }}{{ messages | tojson }}",
        "{{ mine }}{{ more.a }}",
    ],
)
def test_what_a_template_may_use(piece: str, tmp_path: Path) -> None:
    path = write_model(tmp_path, piece + BASE)
    variables = {"mine": 7, "more": {"a": "b"}}
    text = oracle(path).apply_chat_template(TALK, tokenize=False, add_generation_prompt=True, **variables)
    assert ChatTokenizer(path).render(TALK, add_generation_prompt=True, **variables) == text


@pytest.mark.parametrize(
    "piece",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ ''.__class__ }}",
        "{% set ns = namespace(_a=1) %}",
        "{{ messages.append(1) }}",
        "{{ 1 / 0 }}",
        "{{ tools[0] }}",
        "{{ undefined_name | tojson }}",
        "{{ none + 'x' }}",
        "{{ range(10 ** 9) | list }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ strftime_now(1) }}",
    ],
)
def test_templates_that_fail_say_so(piece: str, tmp_path: Path) -> None:
    path = write_model(tmp_path, piece + BASE)
    try:
        text = oracle(path).apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
    except Exception:  # noqa: BLE001 - templates of strangers may fail in any way
        with pytest.raises(ChatTemplateError, match="tokenizer_config"):
            ChatTokenizer(path).render(TALK, add_generation_prompt=True)
    else:
        assert ChatTokenizer(path).render(TALK, add_generation_prompt=True) == text


def test_a_refusal_has_the_words_of_the_template(tmp_path: Path) -> None:
    write_model(tmp_path, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ChatTemplateError, match="refuses the conversation: roles must alternate"):
        ChatTokenizer(tmp_path).render(TALK, add_generation_prompt=True)


@pytest.mark.parametrize("broken", ["{% for %}", "{{ x", "{% if a %}", "{% unknown %}", "{{ x | unknown }}"])
def test_what_is_not_a_template_is_named_with_file_and_line(broken: str, tmp_path: Path) -> None:
    write_character_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(f"\n{broken}")
    with pytest.raises(ChatTemplateError, match=r"chat_template\.jinja, line 2: the chat template cannot be read"):
        ChatTokenizer(tmp_path)


def test_the_date_is_that_of_the_conversation(tmp_path: Path) -> None:
    write_model(tmp_path, "{{ strftime_now('%d %b %Y') }}" + BASE)
    tokenizer = ChatTokenizer(tmp_path)
    began = datetime(2024, 7, 26, 23, 59, 59)
    assert tokenizer.render(TALK, add_generation_prompt=True, now=began).startswith("26 Jul 2024<")
    today = f"{datetime.now():%d %b %Y}"
    assert tokenizer.render(TALK, add_generation_prompt=True).startswith(today)


def test_messages_stay_as_they_are(tmp_path: Path) -> None:
    write_model(tmp_path, "{% for m in messages %}{{ m.reasoning_content }}{{ m | tojson }}{% endfor %}")
    messages = [{"role": "assistant", "content": None, "thinking": "<|end|>", "tool_calls": [{"a": 1}]}]
    before = repr(messages)
    text = ChatTokenizer(tmp_path).render(messages, add_generation_prompt=False)
    assert text == oracle(tmp_path).apply_chat_template(messages, tokenize=False)
    assert repr(messages) == before
