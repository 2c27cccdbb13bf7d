"""Messages of ``/v1/chat/completions`` reach the chat template whole, and a refusal of it is the client's mistake."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpcrl.inference.embedded.serving.api_text import TextApi
from hpcrl.inference.embedded.serving.errors import ApiError
from hpcrl.models.character_tokenizer import write_character_tokenizer
from hpcrl.models.tokenizer import ChatTokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('no such role') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}<|end|>{% endfor %}"
)


def render(path: Path, messages: list[dict[str, Any]]) -> str:
    write_character_tokenizer(path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = ChatTokenizer(path)
    api = TextApi(SimpleNamespace(tokenizer=tokenizer))  # type: ignore[arg-type]
    request = SimpleNamespace(messages=messages, add_generation_prompt=False)
    return tokenizer.decode(api._render(request), skip_special_tokens=False)  # type: ignore[arg-type]


def test_further_fields_are_kept(tmp_path: Path) -> None:
    messages = [{"role": "assistant", "content": None, "tool_calls": [{"name": "a"}]}]
    assert render(tmp_path, messages) == '<|assistant|>[{"name": "a"}]<|end|>'


def test_what_the_template_would_leave_out_is_refused(tmp_path: Path) -> None:
    """An answer must not look as if it had followed it."""
    for message, said in (
        ({"role": "assistant", "content": "", "function_call": {"name": "a"}}, "does not read function_call"),
        ({"role": "developer", "content": "x"}, "does not know the role developer"),
    ):
        with pytest.raises(ApiError, match=said):
            render(tmp_path, [message])
    # results of calls are told by their order
    assert render(tmp_path, [{"role": "tool", "tool_call_id": "1", "content": "x"}]) == "<|tool|>x<|end|>"


def test_a_refusal_of_the_template_is_a_bad_request(tmp_path: Path) -> None:
    with pytest.raises(ApiError, match="no such role"):
        render(tmp_path, [{"role": "bad", "content": "x"}])
