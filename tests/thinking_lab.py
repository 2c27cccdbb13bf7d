"""A small model that thinks: characters, control tokens of Qwen 3, a template that never writes earlier thinking.

A conversation whose thinking is cut branches behind each turn that has some.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from hpcrl.models.character_tokenizer import write_character_tokenizer

MARKS = ("think", "tool_call", "tool_response")
TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *(f"<{edge}{mark}>" for mark in MARKS for edge in ("", "/")),
)
TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
BEGINS_THINKING = TEMPLATE.replace("<|im_start|>assistant\\n", "<|im_start|>assistant\\n<think>\\n")
"""The same, with the beginning of a thought in each prompt, so that every turn has one."""
CUT: dict[str, Any] = {"format": "qwen3", "thinking": "cut"}
"""``model.chat`` of a recipe."""


def write_thinking_tokenizer(path: Path, template: str = TEMPLATE) -> int:
    """Write tokenizer, template and stop tokens; returns the size of the vocabulary."""
    write_character_tokenizer(path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in TOKENS])
    tokenizer.save(str(path / "tokenizer.json"))
    config = json.loads((path / "tokenizer_config.json").read_text())
    config |= {"eos_token": "<|im_end|>", "chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    ends = [tokenizer.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>")]
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return tokenizer.get_vocab_size()
