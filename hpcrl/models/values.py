"""Valid values of a ``config.json`` other than its sizes: numbers, groups of experts, token ids, storage of weights.

Plans do not compute with most of these, so that without these checks a model that cannot be trained would be planned.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

Config = Mapping[str, Any]

#: numbers, with their exclusive lower bound and the largest plausible value
_ABOVE_ZERO = {
    "rms_norm_eps": 1.0,
    "layer_norm_epsilon": 1.0,
    "rope_theta": 1e12,
    "routed_scaling_factor": 1e6,
    "partial_rotary_factor": 1.0,
    "swiglu_limit": 1e6,
}
#: numbers from 0
_FROM_ZERO = {
    "initializer_range": 1e3,
    "attention_dropout": 1.0,
    "router_aux_loss_coef": 1e6,
    "router_jitter_noise": 1.0,
}
_WORDS = ("hidden_act", "mlp_hidden_act", "scoring_func", "topk_method")
_MAPPINGS = ("rope_scaling", "rope_parameters", "quantization_config")
_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
#: storage formats of weights that a trainer reads, in addition to a plain dtype; MXFP4 for gpt-oss alone
_STORED = "block FP8 (quant_method fp8, weight_block_size [128, 128])"


def value_faults(config: Config) -> Iterator[str]:
    """Yield a fault for each value of another kind, or out of range."""
    for open_below, table in ((True, _ABOVE_ZERO), (False, _FROM_ZERO)):
        for key, most in table.items():
            value = config.get(key, most)
            if not _is_number(value):
                yield f"{key} is {value!r}, not a number"
            elif not 0 <= value <= most or (open_below and value == 0):
                yield f"{key} is {value}; it must be {'above' if open_below else 'from'} 0, and {most:g} at most"
    for key in _WORDS:
        if not isinstance(config.get(key, ""), str):
            yield f"{key} is {config[key]!r}, not text"
    for key in _MAPPINGS:
        if not isinstance(config.get(key, {}), Mapping):
            yield f"{key} is {config[key]!r}, not an object"
    ends = config.get("eos_token_id", 0)
    if not _are_ids(ends):
        yield f"eos_token_id is {ends!r}, not a number of a token or a list of them"
    if config.get("is_encoder_decoder"):
        yield "is_encoder_decoder is set; a model with an encoder is not known"


def value_relations(config: Config) -> Iterator[str]:
    """Yield a fault for values that do not fit each other, or that no family supports; all are of the right kind."""
    yield from _storage(config)
    yield from _groups(config)
    yield from _rotation(config)
    ends, vocabulary = config.get("eos_token_id", 0), config.get("vocab_size", math.inf)
    if (last := max(ends) if isinstance(ends, list) else ends) >= vocabulary:
        yield f"eos_token_id is {last}; tokens are 0 to {vocabulary - 1}"
    dense, layers = config.get("first_k_dense_replace", 0), config.get("num_hidden_layers", math.inf)
    if dense > layers:
        yield f"first_k_dense_replace is {dense}, more than the {layers} of num_hidden_layers"
    if config.get("moe_layer_freq", 1) != 1:
        found = config["moe_layer_freq"]
        yield f"moe_layer_freq is {found!r}; known is 1: experts in every layer behind the dense ones"
    heads, groups = config.get("mamba_num_heads", 0), config.get("n_groups", config.get("mamba_n_groups", 1))
    if heads % groups:
        yield f"mamba_num_heads ({heads}) is not a multiple of n_groups ({groups})"


def _storage(config: Config) -> Iterator[str]:
    quantised = config.get("quantization_config")
    if not quantised:
        return
    method = quantised.get("quant_method")
    if method == "mxfp4" and config.get("model_type") == "gpt_oss":
        return
    if method != "fp8":
        yield f"quantization_config has quant_method {method!r}; known is {_STORED}, or none"
    elif quantised.get("weight_block_size") != [128, 128]:
        yield f"quantization_config has weight_block_size {quantised.get('weight_block_size')!r}; known is {_STORED}"


def _groups(config: Config) -> Iterator[str]:
    """Yield the faults of groups over which experts are divided, and of which a token takes the best."""
    experts = next((config[key] for key in _EXPERTS if key in config), None)
    count, taken = config.get("n_group", 1), config.get("topk_group", 1)
    if experts is None or count == 1:
        return
    chosen = config.get("num_experts_per_tok", 1)
    if experts % count:
        yield f"n_group is {count}, which does not divide the {experts} experts"
    elif taken > count:
        yield f"topk_group is {taken}, more than the {count} of n_group"
    elif chosen > taken * (experts // count):
        reached = taken * (experts // count)
        yield f"num_experts_per_tok is {chosen}, more than the {reached} experts of topk_group groups"


def _rotation(config: Config) -> Iterator[str]:
    # attention of Nemotron-H has no positions; that of MLA rotates channels of their own
    key = "qk_rope_head_dim" if "kv_lora_rank" in config else "head_dim"
    if config.get("model_type") != "nemotron_h" and config.get(key, 2) % 2:
        yield f"{key} is {config[key]}; rotary embeddings turn pairs of channels"
    scaling = config.get("rope_scaling") or config.get("rope_parameters", {})
    for name in ("factor", "rope_theta", "partial_rotary_factor"):
        value = scaling.get(name, 1.0)
        if value is not None and (not _is_number(value) or value <= 0):
            yield f"{name} of rope_scaling or rope_parameters is {value!r}; it must be a number above 0"
        elif value is not None and value > _ABOVE_ZERO.get(name, value):
            yield f"{name} of rope_scaling or rope_parameters is {value}; it must be {_ABOVE_ZERO[name]:g} at most"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _are_ids(value: Any) -> bool:
    ids = value if isinstance(value, list) and value else [value]
    return all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in ids)
