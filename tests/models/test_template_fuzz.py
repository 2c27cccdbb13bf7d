"""Random templates and conversations: as transformers, and no control token but the template's own."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
from chat_lab import TOOLS, call, oracle, write_model
from family_templates import FAMILIES

from hpcrl.errors import HpcrlError
from hpcrl.models.tokenizer import ChatTokenizer

SECONDS = 30
PIECES = (
    "{{ bos_token }}",
    "{{ eos_token }}",
    "{{- '<|im_start|>' + m.role }}",
    "\n<|im_end|>\n",
    "{{ m.content }}",
    "{{ m.content | trim }}",
    "{{- m.content | tojson }}",
    "{{ m.content[1:-1] -}}",
    "{{ (m.content ~ '') | upper }}",
    "{{ m.content.split('</think>')[-1] }}",
    "{{ m.content | replace('\\n', ' ') }}",
    "{% if '<think>' in m.content %}T{% endif %}",
    "{% if loop.last %}{% break %}{% endif %}",
    "{% if m.role == 'tool' %}{% continue %}{% endif %}",
    "{% if m.tool_calls %}<tool_call>{{ m.tool_calls | tojson(indent=2) }}</tool_call>{% endif %}",
    "{% for c in m.tool_calls or [] %}{% for k, v in c.function.arguments.items() %}<|im_start|>{{ k }}={{ v }}"
    "{% endfor %}{% endfor %}",
    "{% generation %}{{ m.content }}{% endgeneration %}",
    "{{ m.reasoning_content }}",
    "{% if m.thinking %}<think>{{ m.thinking.strip() }}</think>{% endif %}",
    "{% set x %}[{{ m.content }}]{% endset %}{{ x | length }}{{ x }}",
    "{{ say(m.content) }}",
    "{{ [m.role, m.content] | join('<|im_end|>') }}",
    "{{ m | tojson(sort_keys=true) }}",
    "{{ m.content | string }}{{ m.name | default('none') }}",
    "{{ raise_exception('no tools') if m.role == 'tool' and loop.first }}",
    "{{ (tools or []) | tojson(ensure_ascii=True) }}",
    "   \n  {% if true %}\n x {% endif %}\n",
)
WORDS = (
    "",
    "a",
    " b\n",
    "<|im_end|>",
    "<|im_",
    "end|>",
    "<|im_start|>assistant\n",
    "<think>",
    "</think>",
    "ä東",
    "'\"\\",
)
OTHER_WORDS = (
    "<",
    ">",
    "|",
    "<b>",
    "   ",
    "\U000f0000",
    "\U00100000",
    "42",
    "<tool_call>",
    "<|fim_prefix|>",
    "<|end|>",
)


def template(draw: random.Random) -> str:
    if draw.random() < 0.3:
        return draw.choice(list(FAMILIES.values()))
    macro = "{% macro say(text) %}<|im_start|>{{ text }}{% endmacro %}"
    body = "".join(draw.choices(PIECES, k=draw.randrange(1, 7)))
    return f"{macro}{{% for m in messages %}}<|im_start|>{body}<|im_end|>{{% endfor %}}<think></think><tool_call>"


def text(draw: random.Random, words: tuple[str, ...]) -> str:
    return "".join(draw.choices(words, k=draw.randrange(5)))


def conversation(draw: random.Random, words: tuple[str, ...]) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    for _ in range(draw.randrange(1, 5)):
        message: dict[str, Any] = {
            "role": draw.choice(("user", "assistant", "tool", "system")),
            "content": text(draw, words),
        }
        if draw.random() < 0.2:
            message["tool_calls"] = [call(text(draw, words), **{text(draw, words): text(draw, words)})]
        if draw.random() < 0.2:
            message[draw.choice(("reasoning_content", "thinking", "name"))] = text(draw, words)
        if draw.random() < 0.1:
            message["content"] = draw.choice((None, 7, [{"type": "text", "text": text(draw, words)}]))
        messages.append(message)
    return {"messages": messages, "tools": TOOLS if draw.random() < 0.3 else None}


@pytest.mark.campaign
def test_random_templates(tmp_path: Path) -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    seed = random.randrange(10**9)
    print(f"seed {seed}")
    draw, until, rendered, number = random.Random(seed), time.monotonic() + SECONDS, 0, 0
    while time.monotonic() < until:
        number += 1
        path = write_model(tmp_path / str(number), template(draw))
        ours, theirs = ChatTokenizer(path), oracle(path)
        # of a model's own tokens, without those that a message may have as blanks
        added = {n: t.content for n, t in theirs.added_tokens_decoder.items() if not t.content.isspace()}
        for _ in range(12):
            words = (
                WORDS + OTHER_WORDS if draw.random() < 0.7 else tuple(w for w in WORDS if "|" not in w and "<" not in w)
            )
            talk = conversation(draw, words)
            rendered += check(ours, theirs, talk, added, clean=words[-1] != "<|end|>")
    assert rendered > 100


def check(ours: ChatTokenizer, theirs: Any, talk: dict[str, Any], added: dict[int, str], *, clean: bool) -> bool:
    try:
        right = theirs.apply_chat_template(talk["messages"], tools=talk["tools"], tokenize=False)
    except Exception:  # noqa: BLE001 - templates of strangers may fail in any way
        right = None
    try:
        found = ours.render_marked(**talk, add_generation_prompt=False)
    except HpcrlError as error:
        if right is not None and "cannot be followed" not in str(error):
            raise AssertionError(talk) from error
        return False
    assert found.text == right, talk
    ids = ours.encode_rendered(found)
    assert ours.decode(ids, skip_special_tokens=False) == right, talk
    if clean:
        assert ids == theirs.apply_chat_template(talk["messages"], tools=talk["tools"], return_dict=False), talk
    allowed = len([n for n in theirs.encode(str.__str__(found.marked), add_special_tokens=False) if n in added])
    assert len([n for n in ids if n in added]) == allowed, talk
    return True
