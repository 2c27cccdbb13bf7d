"""Model directories whose tokenizer is ranks of tiktoken and Python code, as Kimi's."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from typing import Any

import tiktoken
from chat_lab import byte_tokenizer

HAN = r"\p{Han}"
UPPER, LOWER = (rf"[\p{{{kind}}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^{HAN}]]" for kind in (r"Lu}\p{Lt", "Ll"))
PATTERN = "|".join(
    [
        rf"[{HAN}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
"""What Kimi K2 splits texts by."""
CODE = """
raise RuntimeError("this code is never run")


class TikTokenTokenizer(PreTrainedTokenizer):
    num_reserved_special_tokens = 256
    pat_str = "|".join([{parts}])

    def __init__(self, vocab_file, added_tokens_decoder, **kwargs):
        num_base_tokens = len(load_tiktoken_bpe(vocab_file))
        self.special_tokens = {{
            self.names.get(i, f"<|reserved_token_{{i}}|>"): i
            for i in range(num_base_tokens, num_base_tokens + self.num_reserved_special_tokens + 2)
        }}

    def apply_chat_template(self, conversation, tools=None, **kwargs):
        tools = deep_sort_dict(tools)
        return super().apply_chat_template(conversation, tools=tools, **kwargs)
"""
SPECIAL = (
    "[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "[EOT]",
    "[PAD]", "[UNK]",
)  # fmt: skip
PLAIN = (
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
    "<|tool_call_end|>", "<think>", "</think>",
)  # fmt: skip
TEMPLATE = (
    "{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}"
    "{% for m in messages %}<|im_{{ m.role }}|>{{ m.name or m.role }}<|im_middle|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)


def trained_ranks() -> dict[bytes, int]:
    """Return the ranks of a small vocabulary: all bytes in some order, and merges."""
    letters = _bytes_of_letters()
    ranks = {bytes([byte]): rank for rank, byte in enumerate(random.Random(5).sample(range(256), 256))}
    for one, other in json.loads(byte_tokenizer().to_str())["model"]["merges"]:
        ranks[bytes(letters[letter] for letter in one + other)] = len(ranks)
    return ranks


def write_ranks(path: Path, ranks: dict[bytes, int]) -> None:
    """Write a file of ranks."""
    lines = (base64.b64encode(token) + f" {rank}\n".encode() for token, rank in ranks.items())
    path.write_bytes(b"".join(lines))


def write_kimi(path: Path, ranks: dict[bytes, int], template: str = TEMPLATE, **config: Any) -> Path:
    """Write a model directory without weights."""
    path.mkdir(parents=True, exist_ok=True)
    write_ranks(path / "tiktoken.model", ranks)
    parts = ", ".join(repr(part) for part in PATTERN.split("|"))
    (path / "tokenization_kimi.py").write_text(CODE.format(parts=parts), encoding="utf-8")
    added = {}
    for number, (content, special) in added_tokens(ranks).items():
        added[str(number)] = {"content": content, "special": special, "normalized": False}
    made = {"added_tokens_decoder": added, "bos_token": "[BOS]", "eos_token": "[EOS]", "chat_template": template}
    made["auto_map"] = {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}
    (path / "tokenizer_config.json").write_text(json.dumps(made | config), encoding="utf-8")
    return path


def added_tokens(ranks: dict[bytes, int]) -> dict[int, tuple[str, bool]]:
    """Return the named tokens by number, and whether they are special; some numbers between them have no name."""
    found = {len(ranks) + i: (token, True) for i, token in enumerate(SPECIAL)}
    return found | {len(ranks) + 20 + i: (token, False) for i, token in enumerate(PLAIN)}


def oracle_of_ranks(ranks: dict[bytes, int], pattern: str = PATTERN) -> tiktoken.Encoding:
    """Make the encoding as the published code makes it."""
    named = added_tokens(ranks)
    numbers = range(len(ranks), len(ranks) + 258)
    special = {named[number][0] if number in named else f"<|reserved_token_{number}|>": number for number in numbers}
    return tiktoken.Encoding("kimi", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


def _bytes_of_letters() -> dict[str, int]:
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return {chr(byte if byte in seen else next(others)): byte for byte in range(256)}
