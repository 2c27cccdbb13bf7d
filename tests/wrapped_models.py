"""Small models that also see, with random weights, saved as transformers saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from model_agreement import VOCAB

from hpcrl.models.character_tokenizer import write_character_tokenizer

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
_QWEN35_EYES = {key: value for key, value in _QWEN_EYES.items() if key != "deepstack_visual_indexes"}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
    # states that are nearly zero would be all rounding
    "rms_norm_eps": 1e-2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    | {"mrope_section": [1, 1, 0], "mrope_interleaved": True},
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
    "qwen3_5": ({"model_type": "qwen3_5_text", **_DELTA}, {"model_type": "qwen3_5_vision", **_QWEN35_EYES}),
    "qwen3_5_moe": (
        {"model_type": "qwen3_5_moe_text", **_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 20},
        {"model_type": "qwen3_5_moe_vision", **_QWEN35_EYES},
    ),
    "qwen3_vl": ({"model_type": "qwen3_vl_text"}, {"model_type": "qwen3_vl", **_QWEN_EYES}),
    "qwen3_vl_moe": ({"model_type": "qwen3_vl_moe_text", **_EXPERTS}, {"model_type": "qwen3_vl_moe", **_QWEN_EYES}),
}
KINDS = (*_KINDS, "qwen3_vl_moe, published", "qwen3_5_moe, published")
"""``model_type`` of each; those with experts also as published, which transformers reads and does not write."""


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
    if kind != model_type:
        (_turn_experts if model_type == "qwen3_vl_moe" else _stack_experts)(path / "model.safetensors")
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


def _stack_experts(path: Path) -> None:
    """Write experts as two tensors a layer, ``[experts, out, in]``, and multi-token prediction beside the model."""
    import torch
    from safetensors.torch import load_file, save_file

    found = load_file(path)
    experts = sorted({name.partition(".experts.")[0] for name in found if ".experts." in name})
    assert experts
    stacked = {name: tensor for name, tensor in found.items() if ".experts." not in name}
    for layer in experts:
        own = [
            {part: found[f"{layer}.experts.{e}.{part}_proj.weight"] for part in ("gate", "up", "down")}
            for e in range(_EXPERTS["num_experts"])
        ]
        stacked[f"{layer}.experts.gate_up_proj"] = torch.stack([torch.cat((e["gate"], e["up"])) for e in own])
        stacked[f"{layer}.experts.down_proj"] = torch.stack([each["down"] for each in own])
    size = _TEXT["hidden_size"]
    stacked["mtp.fc.weight"] = torch.randn(size, 2 * size)
    for name in ("gate_up_proj", "down_proj"):
        stacked[f"mtp.layers.0.mlp.experts.{name}"] = stacked[f"{experts[0]}.experts.{name}"] + 1
    save_file(stacked, path, {"format": "pt"})
