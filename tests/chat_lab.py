"""Tokenizers, conversations and the oracle of tests of chat templates."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = (
    "the tool says that you are a helpful assistant and the user asks for the weather in Paris today",
    "<|im_start|>user im_end assistant tool_call think function parameters name arguments role content",
    '{"name": "weather", "arguments": {"city": "Paris"}} def main(): return 42 # comment\n\n    if x < 3 and y > 4:',
)
WORDS = r"'s|'t|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
MARKS = re.compile(
    r"<\|[^|<>\s'\"{}]+\|>|<｜[^｜<>\s'\"{}]+｜>|</?[a-zA-Z_][\w.]*>|\[/?[A-Z][A-Z_]+\]|\[gMASK\]|<\|[A-Z_]+\|>"
)
"""What looks like a control token in a template."""


def byte_tokenizer() -> Tokenizer:
    """Make a small byte-level tokenizer as Qwen's or Llama 3's is."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(WORDS), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def piece_tokenizer() -> Tokenizer:
    """Make a tokenizer that has blanks as ``▁`` and one of them before a text, as Llama 2's."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    specials = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=specials, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    saved = json.loads(tokenizer.to_str())
    saved["added_tokens"] = saved["added_tokens"][:1]
    return Tokenizer.from_str(json.dumps(saved))


def marks_of(template: str) -> list[str]:
    """Return what looks like a control token in a template."""
    return sorted(set(MARKS.findall(template)))


def write_model(path: Path, template: Any, tokenizer: Tokenizer | None = None, **config: Any) -> Path:
    """Write the files of a tokenizer whose control tokens are those that ``template`` writes, and a few more."""
    tokenizer = byte_tokenizer() if tokenizer is None else tokenizer
    marks = marks_of(json.dumps(template, ensure_ascii=False))
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    plain = ["<|fim_prefix|>", "   ", "<think>", "</think>", "<tool_call>", "</tool_call>"]
    first = [mark for mark in ("<|bos|>", "<|end|>", *marks) if mark not in (*plain, *known)]
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in dict.fromkeys(first)])
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in plain])
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    made = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|bos|>", "eos_token": "<|end|>"}
    made |= {"chat_template": template, **config}
    made = {key: value for key, value in made.items() if value != "absent"}
    (path / "tokenizer_config.json").write_text(json.dumps(made), encoding="utf-8")
    return path


def oracle(path: Path) -> Any:
    """Load the tokenizer of a directory by transformers."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(path))


def call(name: str, **arguments: Any) -> dict[str, Any]:
    """Make a tool call as messages have it."""
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Its name & <country>"}},
                "required": ["city"],
            },
        },
    }
]
_USER = {"role": "user", "content": "it's <b> & 1 ä 東京"}
_SAYS = {"role": "assistant", "content": "  42\n"}
_CALLS = {"role": "assistant", "content": "", "tool_calls": [call("weather", city='Pa"ris', days=2, exact=True)]}
_THINKS = {"role": "assistant", "content": "so", "reasoning_content": "let me\nthink"}
_TOOL = {"role": "tool", "tool_call_id": "call_1", "name": "weather", "content": '{"sky": "blue"}'}
_SYSTEM = {"role": "system", "content": "You are terse."}
TALKS: dict[str, dict[str, Any]] = {
    "one": {"messages": [_USER]},
    "system": {"messages": [_SYSTEM, _USER]},
    "turns": {"messages": [_USER, _SAYS, _USER]},
    "none": {"messages": [_USER, {**_CALLS, "content": None}, _TOOL]},
    "reasoning": {"messages": [_USER, _THINKS, _USER]},
    "reasoning tool": {"messages": [_USER, {**_CALLS, "reasoning_content": "hm"}, _TOOL]},
    "tools": {"messages": [_SYSTEM, _USER], "tools": TOOLS},
    "calls": {"messages": [_SYSTEM, _USER, _CALLS, _TOOL, _SAYS, _USER], "tools": TOOLS},
    "two results": {"messages": [_USER, _CALLS, _TOOL, _TOOL], "tools": TOOLS},
    "documents": {"messages": [_USER], "documents": [{"title": "A", "text": "it is <b>"}]},
    "parts": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "2"}]}]
    },
    "switch": {"messages": [_USER, _THINKS, _USER], "enable_thinking": False},
}


def ways(talk: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a conversation as arguments, with and without a generation prompt."""
    return [{**copy.deepcopy(talk), "add_generation_prompt": flag} for flag in (True, False)]


def spelled(value: Any, text: str) -> Any:
    """Return a copy of a conversation with ``text`` put into each string and each name of an argument."""
    if isinstance(value, str):
        return f"{value[: len(value) // 2]}{text}{value[len(value) // 2 :]}"
    if isinstance(value, list):
        return [spelled(item, text) for item in value]
    if isinstance(value, dict):
        kept = ("role", "type", "id", "tool_call_id", "required", "properties")
        return {key: item if key in kept else spelled(item, text) for key, item in value.items()}
    return value
