"""Defaults of keys that a ``config.json`` leaves out, or has under another name: one table a family.

Trainer, embedded engine and planner all read a config through `completed`, so that they cannot differ. Values are those
of the config classes of transformers, which vLLM reads configs with; a test compares every one of them. Sizes that no
config leaves out are not here: readers refuse a config without them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_GROUPED = {"attention_bias": False, "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0}
_SIGMOID = {"n_shared_experts": 1, "norm_topk_prob": True, "n_group": 1, "topk_group": 1, "rope_theta": 10_000.0}
_SIGMOID |= {"attention_bias": False, "tie_word_embeddings": False}
_DEEPSEEK = {**_SIGMOID, "rms_norm_eps": 1e-6, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4}
_DEEPSEEK |= {"first_k_dense_replace": 3, "q_lora_rank": 1536}
_INDEXER = {"index_topk": 2048, "index_head_dim": 128}
_DELTA = {
    **_GROUPED,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_NEMOTRON = {
    "attention_bias": False,
    "tie_word_embeddings": False,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "chunk_size": 128,
    "use_conv_bias": True,
    "use_bias": False,
    "mlp_bias": False,
    "time_step_min": 0.001,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "layer_norm_epsilon": 1e-5,
    "num_nextn_predict_layers": 0,
}

DEFAULTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "qwen2": {
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10_000.0,
            "num_key_value_heads": 32,
            "use_sliding_window": False,
        },
        "llama": {**_GROUPED, "mlp_bias": False},
        "mistral": {
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10_000.0,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
        },
        "qwen3": {**_GROUPED, "num_key_value_heads": 32, "head_dim": 128, "use_sliding_window": False},
        "qwen3_moe": {
            **_GROUPED,
            "num_key_value_heads": 4,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "intermediate_size": 6144,
            "use_sliding_window": False,
        },
        "qwen3_next": {
            **_DELTA,
            "num_key_value_heads": 2,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "intermediate_size": 5632,
        },
        "qwen3_5_text": {**_DELTA, "num_key_value_heads": 4},
        "qwen3_5_moe_text": {**_DELTA, "num_key_value_heads": 2},
        "deepseek_v3": {**_DEEPSEEK, "rope_interleave": True},
        "kimi_k2": {**_DEEPSEEK, "rope_interleave": True},
        "deepseek_v32": {**_DEEPSEEK, **_INDEXER, "index_n_heads": 64, "mlp_bias": False},
        "glm_moe_dsa": {
            **_SIGMOID,
            **_INDEXER,
            "index_n_heads": 32,
            "mlp_bias": False,
            "rms_norm_eps": 1e-5,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 3,
            "q_lora_rank": 2048,
        },
        "glm4_moe_lite": {
            **_SIGMOID,
            "rms_norm_eps": 1e-5,
            "routed_scaling_factor": 1.8,
            "q_lora_rank": 768,
            "rope_interleave": True,
        },
        "glm4_moe": {
            **_SIGMOID,
            "rms_norm_eps": 1e-5,
            "routed_scaling_factor": 1.0,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 8,
            "use_qk_norm": False,
        },
        "gpt_oss": {
            **_GROUPED,
            "attention_bias": True,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150_000.0,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
        "minimax_m2": {
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-6,
            "rope_theta": 5_000_000.0,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
        "mixtral": {
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "num_key_value_heads": 8,
        },
        "llama4_text": {
            "tie_word_embeddings": False,
            "attention_bias": False,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "interleave_moe_layer_step": 1,
            "no_rope_layer_interval": 4,
            "attention_chunk_size": 8192,
        },
        "nemotron_h": _NEMOTRON,
    }
)
"""By ``model_type``; other families have no ``num_nextn_predict_layers`` unless a config says so."""

ALIASES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "qwen3_moe": {"num_local_experts": "num_experts"},
        **{key: {"mtp_num_hidden_layers": "num_nextn_predict_layers"} for key in ("qwen3_5_text", "qwen3_5_moe_text")},
        **{key: {"num_experts": "num_local_experts"} for key in ("gpt_oss", "minimax_m2", "mixtral")},
        **{
            key: {"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"}
            for key in ("deepseek_v3", "deepseek_v32", "kimi_k2", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa")
        },
        "nemotron_h": {
            "num_local_experts": "n_routed_experts",
            "mamba_n_groups": "n_groups",
            "mamba_d_conv": "conv_kernel",
            "mamba_dt_min": "time_step_min",
            "mamba_conv_bias": "use_conv_bias",
            "mamba_chunk_size": "chunk_size",
        },
    }
)
"""Second names of keys, by ``model_type``: the one that is read behind the other."""

NULLS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        **dict.fromkeys(("qwen3_next", "llama4_text"), frozenset({"attention_chunk_size", "rope_theta"})),
        **dict.fromkeys(
            ("deepseek_v3", "deepseek_v32", "kimi_k2", "glm4_moe_lite", "glm_moe_dsa"),
            frozenset({"q_lora_rank", "rope_theta"}),
        ),
        "mistral": frozenset({"sliding_window"}),
    }
)
"""Keys of `DEFAULTS` of which null says something of its own (no compressed queries, no chunks, no window)."""
_DIVIDED = ("qwen2", "llama", "mistral", "qwen3_moe", "glm4_moe", "mixtral")
"""Families whose heads are as wide as the hidden size divided by their number, where a config does not say."""
_KEY_HEADS = "num_key_value_heads"
_NULL_AS_HEADS = ("qwen2", "qwen3")
"""Families of which null heads of keys are as many as those of queries."""


def completed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``config`` with the keys that it leaves out, by its family's defaults, under the names of readers.

    A config of another family comes back as it is.

    Raises
    ------
    ValueError
        A key is null where the family has a value and null has no meaning, or two names of one key disagree.
    """
    found = dict(config)
    kind = found.get("model_type")
    if not isinstance(kind, str) or kind not in DEFAULTS:
        return found
    _join_aliases(kind, found)
    _fill_from_others(kind, found)
    for key, value in DEFAULTS[kind].items():
        if found.get(key, value) is not None:
            found.setdefault(key, value)
        elif kind in _NULL_AS_HEADS and key == _KEY_HEADS and found.get("num_attention_heads") is not None:
            # transformers reads it the same way
            found[key] = found["num_attention_heads"]
        elif key == "rope_theta":
            found[key] = value
        elif key not in NULLS.get(kind, frozenset()):
            raise ValueError(f"{key} is null; leave it out for the {value!r} of {kind}, or give a value")
    return found


def _join_aliases(kind: str, found: dict[str, Any]) -> None:
    """Put values under the first of two names of a key."""
    for second, first in ALIASES.get(kind, {}).items():
        value = found.get(second)
        if value is None:
            continue
        if found.get(first, value) not in (value, None):
            raise ValueError(f"{first} is {found[first]!r} and {second}, its other name, {value!r}")
        found[first] = value
    if kind == "nemotron_h" and found.get("layer_norm_epsilon") is None and found.get("rms_norm_eps") is not None:
        found["layer_norm_epsilon"] = found["rms_norm_eps"]


def _fill_from_others(kind: str, found: dict[str, Any]) -> None:
    """Fill in sizes of heads that follow from other keys."""
    if kind == "qwen2" and found.get("head_dim", 0) is None:
        # its class has no such field, and its model divides only where the key is left out
        raise ValueError("head_dim is null; leave it out for hidden_size / num_attention_heads of qwen2")
    if kind in _DIVIDED and found.get("head_dim") is None:
        width, heads = found.get("hidden_size"), found.get("num_attention_heads")
        if isinstance(width, int) and isinstance(heads, int) and heads > 0 and width % heads == 0:
            found["head_dim"] = width // heads
    if kind == "llama" and found.get(_KEY_HEADS) is None and found.get("num_attention_heads") is not None:
        # its class has no default
        found[_KEY_HEADS] = found["num_attention_heads"]
