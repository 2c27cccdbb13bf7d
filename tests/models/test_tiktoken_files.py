"""Ranks of tiktoken give the token ids that the package tiktoken gives, and what cannot be converted is named."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tiktoken_lab import added_tokens, oracle_of_ranks, trained_ranks, write_kimi, write_ranks

from hpcrl.models.chat_template import ChatTemplateError
from hpcrl.models.tokenizer import ChatTokenizer
from hpcrl.models.tokenizer_files import TokenizerError

PIECES = (
    "the tool says", " weather", "Paris", "'s", "'RE", "'\u017f", "don't", "WORLD'LL", "McDonald", "x1", "1234567",
    "\u0663\u0664", "\u00bd", " ", "  ", "\n", "\r\n\n", "\t", "\u3000", "\u00a0", "!?", " ...", "\n\n  ",
    "\u6f22\u5b57", "\u6f22a\u5b57B", "\u3005\u3007", "\u3072\u3089\u30ab\u30bf", "\u00e9", "e\u0301", "\u01c5",
    "\u03a9\u03c9", "\U0001f642", "\U0001f469\u200d\U0001f467", "\u200d", "\u0b95\u0bcd", "\u2177", "a" * 40, "ab" * 9,
    "-" * 70, "\0", "\ufffd", '{"a": [1, 2]}', "<|im_end|>", "[EOS]", "<think>", "<|tool_call_begin|>", "<|im_end",
    "end|>", "<|reserved_token_600|>", "[BOS",
)  # fmt: skip


def texts(seed: int, count: int) -> list[str]:
    draw = random.Random(seed)
    made = ["".join(draw.choice(PIECES) for _ in range(draw.randrange(1, 25))) for _ in range(count)]
    letters = [
        chr(draw.choice((draw.randrange(0x250), draw.randrange(0x3000), draw.randrange(0xD800)))) for _ in range(4000)
    ]
    return ["", *PIECES, *made, *("".join(draw.choice(letters) for _ in range(30)) for _ in range(count))]


def repetitive_ranks(seed: int) -> tuple[dict[bytes, int], str]:
    """A vocabulary in which many pairs make the same token, and the letters of it."""
    draw = random.Random(seed)
    ranks, letters = {bytes([byte]): byte for byte in range(256)}, draw.choice(["ab", "a", "abc", "a-", "ab'"])
    pool = [letter.encode() for letter in letters]
    for _ in range(80):
        token = draw.choice(pool) + draw.choice(pool)
        if token not in ranks and len(token) < 12:
            ranks[token] = len(ranks)
            pool.append(token)
    return ranks, letters


def test_ids_are_those_of_tiktoken(tmp_path: Path) -> None:
    ranks = trained_ranks()
    ours, theirs = ChatTokenizer(write_kimi(tmp_path, ranks)), oracle_of_ranks(ranks)
    for text in texts(1, 400):
        ids = ours.encode(text)
        assert ids == theirs.encode(text, allowed_special="all"), text
        assert ours.decode(ids, skip_special_tokens=False) == text
    assert ours.vocab_size == theirs.n_vocab
    for number, (token, _) in added_tokens(ranks).items():
        assert ours.id_of(token) == number
    # half of a character that a policy samples is shown as both show it
    for ids in ([ranks[b"\xe6"]], [ranks[b"\xe6"], ranks[b"\xbc"], len(ranks)]):
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)


@pytest.mark.parametrize("seed", range(12))
def test_pairs_that_make_the_same_token(seed: int, tmp_path: Path) -> None:
    ranks, letters = repetitive_ranks(seed)
    ours, theirs = ChatTokenizer(write_kimi(tmp_path, ranks)), oracle_of_ranks(ranks)
    draw = random.Random(seed)
    for _ in range(200):
        text = "".join(draw.choice(letters) for _ in range(draw.randrange(1, 60)))
        assert ours.encode(text) == theirs.encode(text, allowed_special="all"), text


def test_what_a_message_spells_is_text(tmp_path: Path) -> None:
    ranks = trained_ranks()
    tokenizer, theirs = ChatTokenizer(write_kimi(tmp_path, ranks)), oracle_of_ranks(ranks)
    clean = tokenizer.render_ids([{"role": "user", "content": "x"}], add_generation_prompt=True)
    added = {number for number in clean if number >= len(ranks)}
    spelled = [theirs.decode([number]) for number in range(len(ranks), len(ranks) + 258)]
    for token in spelled:
        text = f"a{token}b {token}"
        messages = [{"role": "user", "content": text, "name": token}]
        ids = tokenizer.render_ids(messages, add_generation_prompt=True)
        assert [number for number in ids if number >= len(ranks)] == [n for n in clean if n in added], token
        assert tokenizer.decode(ids, skip_special_tokens=False).count(token) >= 3
        # between the template's own tokens stand the ids of plain text
        at = next(i for i, number in enumerate(ids) if number == tokenizer.id_of("<|im_middle|>")) + 1
        end = ids.index(tokenizer.id_of("<|im_end|>") or -1)
        assert ids[at:end] == theirs.encode(text, disallowed_special=())


def test_tools_stand_in_the_order_of_their_code(tmp_path: Path) -> None:
    path = write_kimi(tmp_path, trained_ranks())
    tools = [{"type": "function", "function": {"name": "<|im_end|>", "a": [{"z": 1, "b": "<|im_user|>"}]}}]
    tokenizer = ChatTokenizer(path)
    text = tokenizer.render([{"role": "user", "content": "x"}], tools=tools, add_generation_prompt=False)
    wanted = [{"function": {"a": [{"b": "<|im_user|>", "z": 1}], "name": "<|im_end|>"}, "type": "function"}]
    assert json.dumps(wanted) in text
    code = path / "tokenization_kimi.py"
    code.write_text(code.read_text().replace("deep_sort_dict(tools)", "tools"))
    text = ChatTokenizer(path).render([{"role": "user", "content": "x"}], tools=tools, add_generation_prompt=False)
    assert json.dumps(tools) in text
    code.write_text(code.read_text().replace("tools = tools", "tools = encode_tools_to_typescript_style(tools)"))
    tokenizer = ChatTokenizer(path)
    with pytest.raises(ChatTemplateError, match="writes tools as TypeScript"):
        tokenizer.render([{"role": "user", "content": "x"}], tools=tools, add_generation_prompt=False)
    assert tokenizer.render([{"role": "user", "content": "x"}], add_generation_prompt=False)


def replaced(path: Path, before: str, after: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert before in text
    path.write_text(text.replace(before, after), encoding="utf-8")


def move_a_token(path: Path) -> None:
    config = json.loads((path / "tokenizer_config.json").read_text())
    added = config["added_tokens_decoder"]
    key = next(key for key, value in added.items() if value["content"] == "<think>")
    added["9"] = added.pop(key)
    (path / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path: (path / "tokenization_kimi.py").unlink(), "the Python file that auto_map .* is missing\n +hint"),
        (lambda path: (path / "tokenization_kimi.py").unlink(), "has no tokenizer.json, and tiktoken.model alone"),
        (lambda path: replaced(path / "tokenizer_config.json", "auto_map", "map"), "the Python file that auto_map"),
        (lambda path: (path / "tokenization_kimi.py").write_text("class X("), "cannot be read as Python code"),
        (lambda path: replaced(path / "tokenization_kimi.py", "pat_str", "pattern"), "has no constant pat_str"),
        (lambda path: replaced(path / "tokenization_kimi.py", '"|".join(', "made("), "has no constant pat_str"),
        (lambda path: replaced(path / "tokenization_kimi.py", "tokens + 2", "tokens + 3"), "in a way that hpcrl"),
        (lambda path: replaced(path / "tokenization_kimi.py", "{1,3}", "{1,3}+"), r"converted exactly at '\{1,3\}\+"),
        (lambda path: replaced(path / "tokenization_kimi.py", "(?!", "(?<!"), "converted exactly at"),
        (lambda path: replaced(path / "tokenization_kimi.py", r"\\s+(?!\\S)", r"\\s+(?!\\h)"), "converted exactly at"),
        (lambda path: replaced(path / "tokenization_kimi.py", r"\\p{Han}", r"\\p{Nowhere}"), "cannot be converted"),
        (lambda path: write_ranks(path / "tiktoken.model", {b"a": 0}), "no token of the byte 0"),
        (lambda path: write_ranks(path / "tiktoken.model", {b"a": 1}), "line 1: a new token and the number 0"),
        (lambda path: (path / "tiktoken.model").write_text("IQ== 0\nIQ== 1\n"), "line 2: a new token"),
        (lambda path: (path / "tiktoken.model").write_text("IQ== x\n"), "line 1: no token in base64 and number"),
        (lambda path: (path / "tiktoken.model").write_text("\nI! 0\n"), "line 2: no token in base64"),
        (lambda path: (path / "tiktoken.model").write_text("version https://git-lfs\n"), "line 1: no token in base64"),
        (lambda path: replaced(path / "tokenizer_config.json", '"[PAD]"', '"the"'), "is in the ranks as well"),
        (move_a_token, "'<think>' the number 9"),
    ],
)  # fmt: skip
def test_what_cannot_be_converted_is_named(change: Any, words: str, tmp_path: Path) -> None:
    path = write_kimi(tmp_path, trained_ranks())
    change(path)
    with pytest.raises(TokenizerError, match=words):
        ChatTokenizer(path)


def test_the_code_is_not_run_and_other_code_does_no_harm(tmp_path: Path) -> None:
    path = write_kimi(tmp_path, trained_ranks())
    assert "raise RuntimeError" in (path / "tokenization_kimi.py").read_text()
    ChatTokenizer(path)
    config = json.loads((path / "tokenizer_config.json").read_text())
    config["auto_map"] = {"AutoTokenizer": ["../outside.TikTokenTokenizer", None]}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path.parent / "outside.py").write_text((path / "tokenization_kimi.py").read_text())
    with pytest.raises(TokenizerError, match="auto_map"):
        ChatTokenizer(path)
