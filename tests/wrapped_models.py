"""Small models that also see, with random weights, saved as transformers saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from model_agreement import VOCAB

from hpcrl.models.tokenizer import write_character_tokenizer

__all__ = ["KINDS", "write_wrapper"]

_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "vocab_size": VOCAB,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_QWEN_EYES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "depth": 1,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 16,
}
_EYES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
_KINDS = {
    "llava": ({"model_type": "llama"}, {"model_type": "clip_vision_model", **_EYES}),
    "mistral3": ({"model_type": "mistral"}, {"model_type": "pixtral", "head_dim": 8, **_EYES}),
    "qwen3_vl": ({"model_type": "qwen3_vl_text"}, {"model_type": "qwen3_vl", **_QWEN_EYES}),
    "qwen3_vl_moe": ({"model_type": "qwen3_vl_moe_text", **_EXPERTS}, {"model_type": "qwen3_vl_moe", **_QWEN_EYES}),
}
_PUBLISHED = "qwen3_vl_moe, published"
KINDS = (*_KINDS, _PUBLISHED)
"""``model_type`` of each; Qwen3-VL with experts also as published, which transformers reads and does not write."""


def write_wrapper(path: Path, kind: str, **text: Any) -> Any:
    """Save one, with a tokenizer; returns transformers' model."""
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModelForImageTextToText

    model_type = kind.partition(",")[0]
    inner, eyes = _KINDS[model_type]
    config = AutoConfig.for_model(model_type, text_config={**_TEXT, **inner, **text}, vision_config=eyes)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.15)
    model.save_pretrained(path)
    if kind == _PUBLISHED:
        _turn_experts(path / "model.safetensors")
    write_character_tokenizer(path)
    (path / "preprocessor_config.json").write_text("{}")
    return model.eval()


def _turn_experts(path: Path) -> None:
    """Write tensors of all experts as ``[experts, in, out]``."""
    from safetensors.torch import load_file, save_file

    found = load_file(path)
    turned = [name for name in found if name.endswith((".experts.gate_up_proj", ".experts.down_proj"))]
    assert turned
    save_file(found | {name: found[name].transpose(1, 2).contiguous() for name in turned}, path, {"format": "pt"})
