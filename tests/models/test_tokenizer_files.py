"""Special tokens, added tokens and chat templates are read from where transformers reads them; errors name the file."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from chat_lab import byte_tokenizer, oracle, write_model

from hpcrl.errors import HpcrlError
from hpcrl.models.tokenizer import ChatTokenizer
from hpcrl.models.tokenizer_files import TokenizerError

NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
    "mask_token",
    "image_token",
    "boi",
)
TEMPLATE = "".join(f"{name}={{{{ {name} }}}};" for name in NAMES) + "{{ messages[0].content }}<|end|>"
TALK = [{"role": "user", "content": "hi <|extra|> there <|old|> x"}]
END = {"__type": "AddedToken", "content": "<|end|>", "lstrip": False, "normalized": True, "rstrip": False}


def write(path: Path, config: dict[str, Any], files: dict[str, Any]) -> Path:
    write_model(path, TEMPLATE, **config)
    for name, content in files.items():
        (path / name).parent.mkdir(exist_ok=True)
        text = content if isinstance(content, str) else json.dumps(content)
        (path / name).write_text(text, encoding="utf-8")
    return path


LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "an object": ({"eos_token": END}, {}),
    "the map alone": (
        {"eos_token": "absent", "bos_token": "absent"},
        {"special_tokens_map.json": {"eos_token": "<|end|>"}},
    ),
    "the map goes first": ({"bos_token": "<|end|>"}, {"special_tokens_map.json": {"bos_token": "<|bos|>"}}),
    "objects in the map": ({}, {"special_tokens_map.json": {"pad_token": {"content": "<|end|>", "lstrip": False}}}),
    "the map is not read": (
        {"added_tokens_decoder": {"3": {"content": "<|extra|>", "special": True}}, "pad_token": None},
        {"special_tokens_map.json": {"bos_token": "<|end|>", "pad_token": "<|bos|>"}},
    ),
    "names of its own": ({"image_token": "<|end|>", "extra_special_tokens": {"boi": "<|bos|>"}}, {}),
    "specific ones": ({"model_specific_special_tokens": {"boi": "<|bos|>"}}, {}),
    "extra ones": ({"extra_special_tokens": ["<|extra|>", "<|old|>"]}, {}),
    "additional ones": ({"additional_special_tokens": ["<|extra|>"]}, {}),
    "additional ones of the map": ({}, {"special_tokens_map.json": {"additional_special_tokens": ["<|extra|>"]}}),
    "extra ones of both": (
        {"extra_special_tokens": ["<|old|>"]},
        {"special_tokens_map.json": {"extra_special_tokens": ["<|extra|>", {"content": "<|more|>"}]}},
    ),
    "added ones": ({}, {"added_tokens.json": {"<|old|>": 5000, "<|extra|>": 4000}}),
    "a decoder": (
        {
            "added_tokens_decoder": {
                "5000": {"content": "<|old|>", "special": False, "lstrip": True},
                "400": {"content": "<|extra|>", "special": True, "normalized": False},
            }
        },
        {},
    ),
    "none": ({"bos_token": None, "pad_token": None}, {}),
    "a class": ({"tokenizer_class": "Qwen2Tokenizer"}, {}),
    "a name that is in no vocabulary": ({"mask_token": "<|nowhere|>"}, {}),
    "a file": ({}, {"chat_template.jinja": "{{ bos_token }}file{{ messages[0].content }}\n"}),
    "a file and more": (
        {},
        {"chat_template.jinja": "default{{ eos_token }}", "additional_chat_templates/tool_use.jinja": "tools"},
    ),
    "more without a default": ({}, {"additional_chat_templates/default.jinja": "named default"}),
    "a list": (
        {"chat_template": [{"name": "default", "template": "d{{ eos_token }}"}, {"name": "tool_use", "template": "t"}]},
        {},
    ),
    "named ones": ({"chat_template": {"default": "d{{ bos_token }}", "rag": "r{% if %}"}}, {}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_as_transformers_reads_it(layout: str, tmp_path: Path) -> None:
    path = write(tmp_path, *LAYOUTS[layout])
    ours, theirs = ChatTokenizer(path), oracle(path)
    for tools in (None, [{"type": "function", "function": {"name": "a"}}]):
        text = theirs.apply_chat_template(TALK, tools=tools, tokenize=False)
        assert ours.render(TALK, tools=tools, add_generation_prompt=False) == text
    plain = [{"role": "user", "content": "hi there"}]
    ids = theirs.apply_chat_template(plain, return_dict=False)
    assert ours.render_ids(plain, add_generation_prompt=False) == ids
    text = TALK[0]["content"]
    assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
    assert ours.vocab_size == len(theirs)
    assert ours.eos_token_id == theirs.eos_token_id


def test_what_cuts_and_pads_batches_does_not_touch_a_prompt(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8, pad_token="<|end|>")
    path = write_model(tmp_path, TEMPLATE, tokenizer)
    ours = ChatTokenizer(path)
    assert ours.decode(ours.encode("a much longer text")) == "a much longer text"
    assert ours.encode("a") == oracle(path).encode("a", add_special_tokens=False)
    assert "pad_token=<|end|>" in ours.render(TALK, add_generation_prompt=False)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer.json", "{", r"tokenizer\.json: the tokenizer cannot be loaded"),
        ("tokenizer.json", "{}", r"tokenizer\.json: the tokenizer cannot be loaded"),
        ("tokenizer_config.json", "{", r"tokenizer_config\.json cannot be read"),
        ("tokenizer_config.json", "[]", r"tokenizer_config\.json must be a JSON object, not list"),
        ("tokenizer_config.json", "{}", "has no chat template"),
        ("tokenizer_config.json", '{"chat_template": "x"}', r"tokenizer_config\.json names no eos_token"),
        ("tokenizer_config.json", '{"chat_template": 7}', r"tokenizer_config\.json: chat_template is neither"),
        ("tokenizer_config.json", '{"chat_template": [7]}', r"tokenizer_config\.json: chat_template: each of a list"),
        ("tokenizer_config.json", '{"chat_template": {"rag": "x"}}', "has no default chat template; there are: rag"),
        ("tokenizer_config.json", '{"eos_token": 3}', r"tokenizer_config\.json: eos_token: a token is a text"),
        ("tokenizer_config.json", '{"eos_token": {"content": 3}}', r"tokenizer_config\.json: eos_token: a token is"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": "y"}}', "'x' is not a token id"),
        ("tokenizer_config.json", '{"extra_special_tokens": 5}', "extra_special_tokens must be a list or an object"),
        ("tokenizer_config.json", '{"chat_template": "x", "eos_token": "<nowhere>"}', "is not in the vocabulary"),
        ("special_tokens_map.json", "[", r"special_tokens_map\.json cannot be read"),
        ("special_tokens_map.json", '{"eos_token": []}', "eos_token: a token is a text"),
        ("added_tokens.json", '{"a": "b"}', r"added_tokens\.json: the id of 'a' is 'b'"),
        ("chat_template.jinja", b"\xff", r"chat_template\.jinja cannot be read"),
    ],
)
def test_what_is_wrong_is_named_with_its_file(name: str, content: Any, words: str, tmp_path: Path) -> None:
    path = write(tmp_path, {}, {})
    if content is None:
        (path / name).unlink()
    else:
        (path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TokenizerError, match=words) as raised:
        ChatTokenizer(path)
    assert isinstance(raised.value, HpcrlError)
    assert isinstance(raised.value, ValueError)
    assert str(tmp_path) in str(raised.value)


def test_damaged_files_are_reported(tmp_path: Path) -> None:
    """Files with a value replaced or cut anywhere load or say what is wrong; nothing else is raised."""
    path = write(tmp_path, {"added_tokens_decoder": {"5": {"content": "<a>"}}, "extra_special_tokens": ["<b>"]}, {})
    told: list[str] = []
    draw, whole = random.Random(7), json.loads((path / "tokenizer_config.json").read_text())
    for _ in range(60):
        key = draw.choice([*whole, "added_tokens_decoder", "model_specific_special_tokens", "my_token"])
        value = draw.choice(
            [None, 1, [], {}, "", "x", [None], {"a": 1}, {"content": ""}, True, [["a"]], {"": ""}, 1e99]
        )
        (path / "tokenizer_config.json").write_text(json.dumps({**whole, key: value}))
        try:
            ChatTokenizer(path).render_ids(TALK, add_generation_prompt=True)
        except HpcrlError as error:
            told.append(str(error))
    assert told
    assert all(str(path) in words for words in told)
