"""Model directories with the chat templates that families have published, and small vocabularies of their own."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from chat_lab import byte_tokenizer, write_model
from tiktoken_lab import added_tokens, trained_ranks, write_kimi
from tokenizers import AddedToken, Tokenizer

PUBLISHED = Path(__file__).parents[1] / ".chat-templates"
TRL, LLAMA_CPP = "trl/chat_templates", "llama.cpp"
needs_templates = pytest.mark.skipif(
    not all((PUBLISHED / each).is_dir() for each in (TRL, LLAMA_CPP)),
    reason="no published templates: python3 tools/bootstrap.py --templates",
)

_IM = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
_VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_GLM = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", *_MARKS)
_GLM_KEYS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")
_DEEPSEEK_CALLS = tuple(
    f"<｜tool▁{what}▁{edge}｜>" for what in ("calls", "call", "outputs", "output") for edge in ("begin", "end")
)
_HARMONY = tuple(f"<|{name}|>" for name in ("start", "end", "return", "call", "channel", "message", "constrain"))
_LLAMA = tuple(f"<|{name}|>" for name in ("begin_of_text", "end_of_text", "start_header_id", "end_header_id"))
_MINIMAX = ("]~!b[", "]~b]", "[e~[", "<minimax:tool_call>", "</minimax:tool_call>", *_MARKS[4:])
_LLAMA_ENDS = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")


class Family(NamedTuple):
    """What a model directory of a family has; ``ends`` are the ids of its generation_config.json, as tokens."""

    chat_format: str
    model_type: str
    template: str
    tokens: tuple[str, ...]
    eos: str
    ends: tuple[str, ...]


FAMILIES = {
    "GLM-4.5": Family(
        "glm-4.5", "glm4_moe", f"{TRL}/glm4moe", (*_GLM, *_GLM_KEYS), _GLM[0], (_GLM[0], _GLM[4], _GLM[6])
    ),
    "GLM-5": Family(
        "glm-5",
        "glm_moe_dsa",
        f"{LLAMA_CPP}/GLM-4.7-Flash",
        (*_GLM, *_GLM_KEYS),
        _GLM[0],
        (_GLM[0], _GLM[4], _GLM[6]),
    ),
    "Qwen2.5": Family("qwen2.5", "qwen2", f"{TRL}/qwen2_5", (*_IM, *_MARKS[:2]), _IM[2], (_IM[2], _IM[0])),
    "Qwen3": Family("qwen3", "qwen3_moe", f"{TRL}/qwen3", (*_IM, *_MARKS), _IM[2], (_IM[2], _IM[0])),
    "Qwen3-2507": Family("qwen3", "qwen3_moe", f"{TRL}/qwen3_instruct_2507", (*_IM, *_MARKS), _IM[2], (_IM[2], _IM[0])),
    "Qwen3-Next": Family(
        "qwen3", "qwen3_next", f"{TRL}/qwen3_instruct_2507", (*_IM, *_MARKS), _IM[2], (_IM[2], _IM[0])
    ),
    "Qwen3.5": Family(
        "qwen3.5", "qwen3_5_moe", f"{TRL}/qwen3_5_think", (*_IM, *_MARKS, *_VISION), _IM[2], (_IM[2], _IM[0])
    ),
    "DeepSeek-V3": Family(
        "deepseek-v3",
        "deepseek_v3",
        f"{TRL}/deepseekv3",
        (*_DEEPSEEK, *_DEEPSEEK_CALLS, "<｜tool▁sep｜>", *_MARKS[4:]),
        _DEEPSEEK[1],
        (_DEEPSEEK[1],),
    ),
    "DeepSeek-V3.1": Family(
        "deepseek-v3",
        "deepseek_v3",
        f"{LLAMA_CPP}/deepseek-ai-DeepSeek-V3.1",
        (*_DEEPSEEK, *_DEEPSEEK_CALLS, "<｜tool▁sep｜>", *_MARKS[4:]),
        _DEEPSEEK[1],
        (_DEEPSEEK[1],),
    ),
    "Kimi-K2": Family("kimi-k2", "kimi_k2", f"{LLAMA_CPP}/moonshotai-Kimi-K2", (), "[EOS]", ("<|im_end|>",)),
    "MiniMax-M2": Family("minimax-m2", "minimax_m2", f"{LLAMA_CPP}/MiniMax-M2", _MINIMAX, _MINIMAX[2], (_MINIMAX[2],)),
    "gpt-oss": Family("gpt-oss", "gpt_oss", f"{TRL}/gptoss", _HARMONY, "<|return|>", ("<|return|>", "<|call|>")),
    "Nemotron-3": Family("nemotron-3", "nemotron_h", f"{TRL}/nemotron_3_nano", (*_IM, *_MARKS), _IM[2], (_IM[2],)),
    "Llama-3.1": Family("llama-3", "llama", f"{TRL}/llama3_1", (*_LLAMA, *_LLAMA_ENDS[1:]), "<|eot_id|>", _LLAMA_ENDS),
}

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "The weather of a city.", "parameters": PARAMETERS},
    }
]


@cache
def _vocabulary() -> str:
    return str(byte_tokenizer().to_str())


def write_family(path: Path, family: Family) -> Path:
    """Write a model directory without weights."""
    template = (PUBLISHED / f"{family.template}.jinja").read_text(encoding="utf-8")
    if family.model_type == "kimi_k2":
        ranks = trained_ranks()
        write_kimi(path, ranks, template)
        ids = {token: number for number, (token, _) in added_tokens(ranks).items()}
    else:
        tokenizer = Tokenizer.from_str(_vocabulary())
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in family.tokens])
        write_model(path, template, tokenizer, eos_token=family.eos, bos_token=family.tokens[0])
        ids = {token: tokenizer.token_to_id(token) for token in family.ends}
    (path / "config.json").write_text(json.dumps({"model_type": family.model_type}))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [ids[token] for token in family.ends]}))
    return path
