"""What is said of a model's chat format before a submit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from chat_lab import byte_tokenizer, write_model
from harness import make_recipe
from start_models import TINY_CONFIG

from hpcrl.models.character_tokenizer import write_character_tokenizer
from hpcrl.models.generation_config import end_tokens
from hpcrl.rollouts.rendering import Renderer
from hpcrl.rollouts.rendering.trial import check_chat

IM = (
    "{# <|endoftext|> #}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_TOOLS = (
    "{% for m in messages if m.role not in ('user', 'assistant') %}{{ raise_exception('no ' ~ m.role) }}{% endfor %}"
)
OWN = [{"name": "mine", "kind": "custom", "factory": "my_module:Mine", "try_before_submit": False}]
CALCULATOR = [{"name": "sums", "kind": "calculator"}]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", IM, eos_token="<|im_end|>")


def configure(model: Path, **changes: Any) -> None:
    (model / "config.json").write_text(json.dumps({**TINY_CONFIG, "vocab_size": 2000, **changes}))


def found(model: Path, **recipe: Any) -> tuple[dict[str, str], list[str]]:
    """What is wrong by key, and what else is said."""
    chat = recipe.pop("chat", {})
    made = make_recipe(model, model={"path": str(model), "chat": chat}, **recipe)
    answer = check_chat(made, model)
    assert all(finding["hint"] for finding in answer["findings"])
    return {finding["key"]: finding["what"] for finding in answer["findings"]}, answer["notes"]


def test_a_model_whose_template_can_everything_is_good(model: Path) -> None:
    configure(model)
    assert found(model, environments=[*OWN, *CALCULATOR]) == ({}, [])


def test_a_format_that_the_vocabulary_does_not_have_is_refused(model: Path) -> None:
    configure(model)
    wrong, _ = found(model, chat={"format": "gpt-oss"})
    assert "gpt-oss: this model does not have it: its vocabulary has no <|return|>" in wrong["model.chat.format"]
    assert found(model, chat={"format": "text"}) == ({}, [])


def test_a_model_without_a_format_of_calls_is_good_for_text(model: Path) -> None:
    configure(model, model_type="gpt_oss")
    assert found(model, environments=OWN) == ({}, [])
    # who names the format wants it
    wrong, _ = found(model, environments=OWN, chat={"format": "gpt-oss"})
    assert "<|return|>" in wrong["model.chat.format"]


def test_what_no_conversation_can_begin_with_is_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path / "refusing", "{{ raise_exception('bring a system message') }}" + IM)
    configure(model)
    wrong, _ = found(model)
    assert "bring a system message" in wrong["model.path"]
    model = write_model(tmp_path / "variable", "{{ 1 // depth }}" + IM, eos_token="<|im_end|>")
    configure(model)
    assert found(model, chat={"variables": {"depth": 1}}) == ({}, [])
    wrong, _ = found(model, chat={"variables": {"depth": 0}})
    assert "ZeroDivisionError" in wrong["model.chat.variables"]


def test_a_tool_turn_is_asked_of_those_who_have_tools(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", NO_TOOLS + IM, eos_token="<|im_end|>")
    configure(model)
    assert found(model) == ({}, [])
    wrong, _ = found(model, environments=CALCULATOR)
    assert "'sums' needs it" in wrong["model.path"]
    assert "no tool" in wrong["model.path"]
    # code of one's own may use tools, and may not
    wrong, (note,) = found(model, environments=OWN)
    assert wrong == {}
    assert note.startswith("tools cannot be used; rollouts of environment 'mine' fail where they need it")


def test_rows_with_tools_need_a_template_and_a_format_for_them(tmp_path: Path) -> None:
    tooled = [
        {
            "name": "asked",
            "kind": "dataset",
            "path": "q.jsonl",
            "columns": {"tools": "functions"},
            "rewards": [{"kind": "tool_call"}],
        }
    ]
    model = write_model(tmp_path / "model", NO_TOOLS + IM, eos_token="<|im_end|>")
    configure(model)
    wrong, _ = found(model, environments=tooled)
    assert "tools cannot be used, as environment 'asked' needs it" in wrong["model.path"]
    wrong, _ = found(model, environments=tooled, chat={"format": "text"})
    assert "environment 'asked' needs calls" in wrong["model.chat.format"]


def test_turns_that_end_with_no_token_of_ends_cannot_be_followed(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", IM, eos_token="<|end|>")
    configure(model)
    wrong, notes = found(model, environments=[*OWN, *CALCULATOR], chat={"format": "text"})
    assert "does not end replies with a token that ends turns" in wrong["model.path"]
    assert notes == []


def test_tokens_that_the_embedding_does_not_have_are_named(model: Path) -> None:
    size = byte_tokenizer().get_vocab_size()
    configure(model, vocab_size=size)
    wrong, _ = found(model)
    assert f"the model has tokens 0 to {size - 1}" in wrong["model.path"]
    # padded embeddings are larger than vocabularies, which is usual
    configure(model, vocab_size=100_000)
    stops = {"rollouts": {"sampling": {"stop_token_ids": [99_999]}}}
    assert found(model, **stops) == ({}, [])
    stops["evaluation"] = {"sampling": {"stop_token_ids": [99_999, 100_000]}}
    assert "100000 is not a token" in found(model, **stops)[0]["evaluation.sampling.stop_token_ids"]
    # what no conversation has does no harm, and is said
    used = Renderer.of_model(model).opening([{"role": "user", "content": "x"}])
    configure(model, vocab_size=max(*used, *Renderer.of_model(model).stop_token_ids) + 1)
    wrong, (note,) = found(model)
    assert wrong == {}
    assert "tokens more than the model" in note


def test_ends_of_config_json_count_where_the_other_file_names_none(tmp_path: Path) -> None:
    """As transformers takes them; the embedded engine ends answers there."""
    write_character_tokenizer(tmp_path)
    assert end_tokens(tmp_path) == ()
    (tmp_path / "config.json").write_text('{"eos_token_id": [4, 5]}')
    assert end_tokens(tmp_path) == (4, 5)
    assert Renderer.of_model(tmp_path).stop_token_ids == (2, 4, 5)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5}')
    assert end_tokens(tmp_path) == (4, 5)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 6}')
    assert end_tokens(tmp_path) == (6,)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "config.json").write_text('{"text_config": {"eos_token_id": 7}}')
    assert end_tokens(tmp_path) == (7,)
    for text in ('{"eos_token_id": null}', '{"eos_token_id": [1, "x"]}', '{"eos_token_id": true}', "[]"):
        (tmp_path / "config.json").write_text(text)
        assert end_tokens(tmp_path) == ()
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json"):
        end_tokens(tmp_path)


def test_the_program_prints_one_document(model: Path) -> None:
    configure(model)
    recipe = make_recipe(model, model={"path": str(model), "chat": {"format": "gpt-oss"}})
    request = {"recipe": recipe.model_dump(mode="json"), "model_dir": str(model)}
    command = [sys.executable, "-m", "hpcrl.rollouts.rendering.trial"]
    out = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, check=True).stdout
    assert json.loads(out)["findings"][0]["key"] == "model.chat.format"
