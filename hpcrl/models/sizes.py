"""Valid values of a ``config.json``: kinds of values, ranges, and sizes that must fit each other.

Readers of families (`hpcrl.models.families`) take sizes as they are. These checks keep a size that no model can have
out of a plan's numbers: 7 KV heads for 48 query heads, an expert that is half a column wide, a layer whose attention
would be counted as another kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hpcrl.models.tensors import DTYPE_BYTES
from hpcrl.models.values import value_faults, value_relations

Config = Mapping[str, Any]

#: whole numbers above 0, with the maximum that is plausible
_SIZES = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "num_hidden_layers": 1 << 12,
    "max_position_embeddings": 1 << 30,
    "intermediate_size": 1 << 24,
    "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "head_dim": 1 << 14,
    "q_lora_rank": 1 << 20,
    "kv_lora_rank": 1 << 20,
    "qk_nope_head_dim": 1 << 14,
    "qk_rope_head_dim": 1 << 14,
    "v_head_dim": 1 << 14,
    "index_n_heads": 1 << 14,
    "index_head_dim": 1 << 14,
    "index_topk": 1 << 30,
    "num_experts": 1 << 16,
    "num_local_experts": 1 << 16,
    "n_routed_experts": 1 << 16,
    "num_experts_per_tok": 1 << 16,
    "n_group": 1 << 16,
    "topk_group": 1 << 16,
    "moe_intermediate_size": 1 << 24,
    "moe_shared_expert_intermediate_size": 1 << 24,
    "moe_latent_size": 1 << 20,
    "decoder_sparse_step": 1 << 12,
    "mamba_num_heads": 1 << 14,
    "mamba_head_dim": 1 << 14,
    "mamba_n_groups": 1 << 14,
    "n_groups": 1 << 14,
    "ssm_state_size": 1 << 16,
    "conv_kernel": 1 << 10,
    "chunk_size": 1 << 24,
    "sliding_window": 1 << 30,
    "attention_chunk_size": 1 << 30,
    "intermediate_size_mlp": 1 << 24,
    "interleave_moe_layer_step": 1 << 12,
    "no_rope_layer_interval": 1 << 12,
    "shared_expert_intermediate_size": 1 << 24,
    "experts_per_token": 1 << 16,
    "full_attention_interval": 1 << 12,
    "linear_num_key_heads": 1 << 14,
    "linear_num_value_heads": 1 << 14,
    "linear_key_head_dim": 1 << 14,
    "linear_value_head_dim": 1 << 14,
    "linear_conv_kernel_dim": 1 << 10,
}
#: whole numbers from 0
_COUNTS = {
    "n_shared_experts": 1 << 10,
    "num_nextn_predict_layers": 1 << 6,
    "num_mtp_modules": 1 << 6,
    "first_k_dense_replace": 1 << 12,
    "index_topk_freq": 1 << 12,
    "index_skip_topk_offset": 1 << 12,
}
_FLAGS = (
    *("tie_word_embeddings", "attention_bias", "mlp_bias", "use_bias", "use_conv_bias", "use_qk_norm"),
    *("norm_topk_prob", "rope_interleave", "use_sliding_window", "is_encoder_decoder"),
)
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
#: families with the gated delta rule, whose heads have a width of their own where a config says none
_DELTA = ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
#: kinds of attention that the readers of families know, by ``layer_types``; full attention alone where none is named
_ATTENTION = {
    "deepseek_v32": {"full_attention", "indexed_attention"},
    "glm_moe_dsa": {"full_attention", "indexed_attention"},
    "gpt_oss": {"full_attention", "sliding_attention"},
    "llama4_text": {"full_attention", "chunked_attention"},
    **{kind: {"full_attention", "linear_attention"} for kind in _DELTA},
}
#: families whose reader looks at ``layer_types`` itself
_HYBRID = frozenset({"nemotron_h"})
#: a list with a word for each layer, and the words
_LAYER_WORDS = {
    "mlp_layer_types": {"dense", "sparse", "moe"},
    "indexer_types": {"full", "shared", "F", "S"},
    "index_topk_pattern": {"full", "shared", "F", "S"},
}
_CHOICES = ("indexer_types", "index_topk_pattern")

#: lists of layers by number
_LAYER_LISTS = ("mlp_only_layers", "moe_layers")


def checked(config: Any) -> dict[str, Any]:
    """Return the config without its nulls, which mean the same as a missing key.

    Raises
    ------
    ValueError
        It is not an object, or values are of another kind, impossible or inconsistent; the message names all of them.
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"config.json holds a {type(config).__name__}, not an object")
    found = {key: value for key, value in config.items() if value is not None}
    # the ranges first: relations between invalid numbers would only repeat the faults
    wrong = list(_kinds(found)) or list(_relations(found))
    if wrong:
        raise ValueError("; ".join(wrong))
    return found


def check_kinds(config: Config) -> None:
    """Refuse values of another kind or out of range (ValueError), one by one; nulls say nothing."""
    if wrong := list(_kinds({key: value for key, value in config.items() if value is not None})):
        raise ValueError("; ".join(wrong))


def _kinds(config: Config) -> Iterator[str]:
    for least, table in ((1, _SIZES), (0, _COUNTS)):
        for key, most in table.items():
            value = config.get(key, least)
            if not isinstance(value, int) or isinstance(value, bool):
                yield f"{key} is {value!r}, not a whole number"
            elif not least <= value <= most:
                yield f"{key} is {value}; it must be from {least} to {most}"
    if not isinstance(kind := config.get("model_type", ""), str):
        yield f"model_type is {kind!r}, not text"
    for key in _FLAGS:
        if not isinstance(config.get(key, False), bool):
            yield f"{key} is {config[key]!r}, not true or false"
    dtype = config.get("dtype", config.get("torch_dtype", "bfloat16"))
    if not isinstance(dtype, str) or dtype.removeprefix("torch.") not in DTYPE_BYTES:
        yield f"dtype is {dtype!r}; known are {', '.join(DTYPE_BYTES)}"
    state = config.get("mamba_ssm_dtype", "float32")
    if not isinstance(state, str) or state not in DTYPE_BYTES:
        yield f"mamba_ssm_dtype is {state!r}; known are {', '.join(DTYPE_BYTES)}"
    for key in ("layer_types", "no_rope_layers", "attn_type_list", *_LAYER_LISTS, *_LAYER_WORDS):
        # patterns may be words of one letter each
        kinds = (list, str) if key == "index_topk_pattern" else list
        if not isinstance(config.get(key, []), kinds):
            yield f"{key} is {config[key]!r}, not a list"
        elif other := [each for each in config.get(key, []) if not isinstance(each, int | str)]:
            yield f"{key} has {other[0]!r}, neither a word nor a whole number"
    yield from value_faults(config)


def _relations(config: Config) -> Iterator[str]:
    yield from _attention(config)
    yield from value_relations(config)
    for name in ("num_experts_per_tok", "experts_per_token"):
        chosen = config.get(name, 1)
        for key in _EXPERTS:
            if chosen > config.get(key, chosen):
                yield f"{name} is {chosen}, more than the {config[key]} of {key}"
    layers = config.get("num_hidden_layers")
    if layers is None:
        return
    for key in _LAYER_LISTS:
        for layer in config.get(key, []):
            if not isinstance(layer, int) or not 0 <= layer < layers:
                yield f"{key} has {layer!r}; layers are 0 to {layers - 1}"
    rotary = config.get("no_rope_layers", [])
    if rotary and len(rotary) < layers:
        yield f"no_rope_layers names {len(rotary)} layers, num_hidden_layers is {layers}"
    for key, words in _LAYER_WORDS.items():
        given = config.get(key, [])
        if given and len(given) != layers:
            yield f"{key} names {len(given)} layers, num_hidden_layers is {layers}"
        if unknown := [word for word in given if not isinstance(word, str) or word not in words]:
            yield f"{key} has {unknown[0]!r}; known are {', '.join(sorted(words))}"
        elif key in _CHOICES and given and given[0] not in ("full", "F"):
            yield f"{key} begins with {given[0]!r}; the first layer has no choice of tokens before it to share"


def _attention(config: Config) -> Iterator[str]:
    heads = config.get("num_attention_heads")
    if heads is None:
        return  # its reader reports that it is missing
    groups = config.get("num_key_value_heads", heads)
    if heads % groups:
        yield f"num_attention_heads ({heads}) is not a multiple of num_key_value_heads ({groups})"
    latent, width = "kv_lora_rank" in config, config.get("hidden_size", heads)
    divided = "head_dim" not in config and config.get("model_type") not in _DELTA
    if not latent and divided and width % heads:
        yield f"hidden_size ({width}) is not a multiple of num_attention_heads ({heads}), and there is no head_dim"
    if config.get("model_type") in _HYBRID:
        return
    kinds, layers = config.get("layer_types", []), config.get("num_hidden_layers")
    if kinds and layers is not None and len(kinds) != layers:
        yield f"layer_types names {len(kinds)} layers, num_hidden_layers is {layers}"
    family = str(config.get("model_type"))
    known = _ATTENTION.get(family, {"full_attention"})
    if other := sorted({str(kind) for kind in kinds} - known):
        yield f"layer_types has {', '.join(other)}; known of {family} is {' and '.join(sorted(known))}"
    if other := [kind for kind in config.get("attn_type_list", []) if kind != 1]:
        yield f"attn_type_list has {other[0]!r}; known of {family} is 1 (full attention)"
    keys, values = config.get("linear_num_key_heads", 1), config.get("linear_num_value_heads")
    if values is not None and values % keys:
        yield f"linear_num_value_heads ({values}) is not a multiple of linear_num_key_heads ({keys})"
    if config.get("use_sliding_window"):
        yield "use_sliding_window is set; a sliding window is not known"
