"""Keys of a ``config.json`` that nothing here reads and that are not known to be harmless.

A key can change what transformers and vLLM compute from the same weights. What is read here is checked or computed;
what changes no computation is in the tables below, some keys with one value alone. Everything else is named before a
run starts (`hpcrl.jobplan.start_model`). A test compares the tables with the config classes of transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from hpcrl.models.arch import ARCHS, ModelArch
from hpcrl.models.arch.rope import RopeScaling
from hpcrl.models.defaults import ALIASES, DEFAULTS
from hpcrl.models.families import FAMILIES

Config = Mapping[str, Any]

_MOST_NAMED = 12
_MOST_LETTERS = 80

# -- what is read -----------------------------------------------------------------------------------------------------

_READ = frozenset(
    {
        *("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
        *("max_position_embeddings", "tie_word_embeddings", "dtype", "torch_dtype", "eos_token_id"),
        # all families refuse values of these other than the supported ones
        *("hidden_act", "layer_types", "attn_type_list", "moe_layer_freq", "use_sliding_window", "is_encoder_decoder"),
    }
)
"""By readers of all families."""
_ROPE_GROUPS = ("rope_scaling", "rope_parameters")
_OF_ROPE = frozenset({*RopeScaling.__dataclass_fields__, "type", "rope_theta", "partial_rotary_factor"})
_OF_STORAGE = frozenset({"quant_method", "weight_block_size"})
_EXPERTS = frozenset({"num_experts_per_tok", "moe_intermediate_size", "n_routed_experts", "num_nextn_predict_layers"})
_LATENT = frozenset({"kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "mtp_embeddings"})
_INDEXER = frozenset({"indexer_types", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset"})
_FAMILY: Mapping[str, frozenset[str]] = {
    "deepseek_v3": _LATENT | {"mlp_layer_types"},
    "kimi_k2": _LATENT | {"mlp_layer_types"},
    "deepseek_v32": _EXPERTS | _LATENT | _INDEXER | {"mlp_layer_types"},
    "glm4_moe_lite": _EXPERTS | _LATENT | {"mlp_layer_types", "first_k_dense_replace"},
    "glm_moe_dsa": _LATENT | _INDEXER | {"mlp_layer_types", "indexer_rope_interleave", "mlp_bias"},
    "glm4_moe": frozenset({"mlp_layer_types", "mtp_embeddings"}),
    "gpt_oss": frozenset({"experts_per_token"}),
    "llama4_text": frozenset({"num_local_experts", "num_experts_per_tok", "intermediate_size_mlp", "moe_layers"})
    | {"no_rope_layers"},
    "minimax_m2": frozenset({"rotary_dim", "num_mtp_modules", "use_mtp", "attention_bias", "router_jitter_noise"}),
    "mixtral": frozenset({"num_local_experts", "num_experts_per_tok", "head_dim", "sliding_window"}),
    "nemotron_h": frozenset({"hybrid_override_pattern", "mtp_hybrid_override_pattern", "sliding_window"}),
    **dict.fromkeys(
        ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), frozenset({"full_attention_interval", "attn_output_gate"})
    ),
}
"""Keys that readers of one family read, in addition to its defaults and the fields of its architecture."""
_SIGMOID = frozenset({"scoring_func", "topk_method"})
_CHOSEN_BY_SIGMOID = ("deepseek_v3", "deepseek_v32", "kimi_k2", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa")
_NO_FIELDS: Mapping[str, frozenset[str]] = {"nemotron_h": frozenset({"first_k_dense_replace"})}
_ARCH_OF: Mapping[str, type[ModelArch]] = {kind: arch for arch in ARCHS for kind in arch.MODEL_TYPES}

# -- what changes no computation --------------------------------------------------------------------------------------

_HARMLESS = frozenset(
    {
        # facts about the file
        *("architectures", "auto_map", "transformers_version", "_name_or_path", "_commit_hash", "_source"),
        *("tokenizer_class", "unsloth_version", "unsloth_fixed", "model_name", "name_or_path"),
        *("is_llama_config", "transformers.js_config", "_model_name_or_path"),
        # settings of training from scratch, and of losses that hpcrl does not have
        *("initializer_range", "router_aux_loss_coef", "router_z_loss_coef", "output_router_logits", "aux_loss_alpha"),
        *("seq_aux", "rescale_prenorm_residual", "time_step_max", "time_step_floor", "gradient_checkpointing"),
        # settings of transformers' calls, and placement of a model
        *("use_cache", "return_dict", "use_return_dict", "output_attentions", "output_hidden_states", "torchscript"),
        *("attn_implementation", "_attn_implementation", "_attn_implementation_autoset", "_experts_implementation"),
        *("ep_size", "use_mamba_kernels", "use_flash_attn", "use_bfloat16", "num_logits_to_keep", "tf_legacy_loss"),
        # settings of other heads than that of a language model
        *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params"),
        # settings of transformers' own generation, which is not used
        *("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "do_sample"),
        *("max_length", "min_length", "max_new_tokens", "num_beams", "num_beam_groups", "num_return_sequences"),
        *("diversity_penalty", "repetition_penalty", "length_penalty", "encoder_no_repeat_ngram_size", "prefix"),
        *("no_repeat_ngram_size", "bad_words_ids", "early_stopping", "remove_invalid_values", "output_scores"),
        *("return_dict_in_generate", "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens"),
    }
)
"""Whatever their values are."""
_TOKENS = ("_token_id", "_token_ids", "_token_index")
"""Ends of names of keys that say which number a token has."""
_WITH_VALUE: Mapping[str, tuple[Any, ...]] = {
    "attention_dropout": (0.0,),
    "hidden_dropout": (0.0,),
    "residual_dropout": (0.0,),
    "resid_pdrop": (0.0,),
    "embd_pdrop": (0.0,),
    "router_jitter_noise": (0.0,),
    "pretraining_tp": (1,),
    "chunk_size_feed_forward": (0,),
    "moe_layer_freq": (1,),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({},),
    "num_nextn_predict_layers": (0,),
    "partial_rotary_factor": (1.0,),
}
"""With these values alone, in every family that does not read the key."""
_OF_FAMILY: Mapping[str, frozenset[str]] = {
    # used where use_sliding_window is set, which is refused
    "qwen2": frozenset({"sliding_window", "max_window_layers"}),
    "qwen3": frozenset({"sliding_window", "max_window_layers"}),
    "qwen3_moe": frozenset({"sliding_window", "max_window_layers"}),
    "gpt_oss": frozenset({"initial_context_length"}),
    # config classes of transformers set these two from other keys
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "kimi_k2", "glm_moe_dsa"), frozenset({"head_dim", "qk_head_dim"})),
    "glm4_moe_lite": frozenset({"qk_head_dim", "head_dim", "partial_rotary_factor"}),
    # attention has no positions, and layers are counted by the list of their kinds
    "nemotron_h": frozenset({*_ROPE_GROUPS, "rope_theta", "partial_rotary_factor", "num_hidden_layers"})
    | {"expand", "mamba_expand", "mamba_dt_max", "mamba_dt_init_floor", "time_step_rank", "moe_shared_expert_overlap"},
    # models that are only planned: these keys change no size
    "llama4_text": frozenset(
        {"attn_scale", "attn_temperature_tuning", "floor_scale", "use_qk_norm", "for_llm_compressor"}
    )
    | {"router_jitter_noise"},
    "qwen3_next": frozenset({"sliding_window", "max_window_layers"}),
    # sections of positions in pictures; those of text are equal
    **dict.fromkeys(
        ("qwen3_5_moe_text", "qwen3_5_text"),
        frozenset({"mrope_section", "mrope_interleaved", "mtp_use_dedicated_embeddings"}),
    ),
}
_OF_FAMILY_WITH_VALUE: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "llama": {"rope_interleaved": (False,)},
    **{kind: {"mlp_only_layers": ([],)} for kind in ("qwen3_5_moe_text", "qwen3_5_text")},
    "minimax_m2": {"mtp_transformer_layers": (1,)},
    "qwen2": {"use_mrope": (False,)},
    "nemotron_h": {
        "mamba_proj_bias": (False,),
        "residual_in_fp32": (False,),
        "mamba_ssm_cache_dtype": ("float32",),
        "time_step_limit": ([0.0, float("inf")],),
        "mamba_dt_limit": ([0.0, float("inf")],),
    },
}
_SAME_AS: Mapping[str, Mapping[str, str]] = {
    **{
        kind: {"num_key_value_heads": "num_attention_heads", "num_experts": "n_routed_experts"}
        for kind in ("deepseek_v3", "deepseek_v32", "kimi_k2", "glm4_moe_lite", "glm_moe_dsa")
    },
    "glm4_moe": {"num_experts": "n_routed_experts"},
    "nemotron_h": {"norm_eps": "layer_norm_epsilon", "rms_norm_eps": "layer_norm_epsilon"},
}
"""Keys that say nothing of their own where they have the value of another one."""
_STORAGE_HARMLESS = frozenset({"modules_to_not_convert", "ignored_layers", "scale_fmt"})
"""Harmless keys of ``quantization_config``: the stored tensors show which of them are quantised, and by which
scales."""
_STORAGE_WITH_VALUE: Mapping[str, tuple[Any, ...]] = {
    "fmt": ("e4m3", "float8_e4m3fn"),
    "activation_scheme": ("dynamic",),
    "dequantize": (False, True),
}
_WRAPPED = frozenset({"model_type", "dtype", "torch_dtype", "text_config"})
_WRAPPERS: Mapping[str, frozenset[str]] = {"llama4": _WRAPPED | {"vision_config", "tie_word_embeddings"}}
"""Keys around the config of a language model; that of Llama 4 is planned without its eyes."""


def read_keys(kind: str) -> frozenset[str]:
    """Return the top-level keys of a ``config.json`` that are read for a ``model_type``.

    Its rope and storage groups are among them.

    Some are read only to refuse other values than the one that is computed.
    """
    arch = _ARCH_OF.get(kind)
    own = frozenset() if arch is None else frozenset({*(field.name for field in fields(arch)), *_checked(arch)})
    if kind in _CHOSEN_BY_SIGMOID:
        own |= _SIGMOID
    # fields that the family shares with others and does not compute with
    own -= _NO_FIELDS.get(kind, frozenset())
    read = _READ | own | DEFAULTS.get(kind, {}).keys() | ALIASES.get(kind, {}).keys() | _FAMILY.get(kind, frozenset())
    return read | {*_ROPE_GROUPS, "rope_theta", "original_max_position_embeddings", "quantization_config"}


def unread_keys(config: Config) -> tuple[str, ...]:
    """Name the keys of a config that are neither read nor known to be harmless, those of groups behind a dot.

    A config of an unknown family has no findings here, because readers refuse it.
    """
    inner, kind = config.get("text_config"), config.get("model_type")
    if isinstance(inner, Mapping):
        around = (
            _WRAPPERS.get(str(kind), frozenset({"text_config"})) | _HARMLESS | {"model_type", "dtype", "torch_dtype"}
        )
        outside = (key for key, value in config.items() if value is not None and key not in around and not _is_id(key))
        own = tuple(_unread(inner, str(inner.get("model_type"))))
        return (*outside, *(f"text_config.{key}" for key in own)) if str(inner.get("model_type")) in FAMILIES else ()
    return tuple(_unread(config, str(kind))) if str(kind) in FAMILIES else ()


def unread_note(config: Config) -> str | None:
    """Say in a sentence which keys `unread_keys` finds; None where there are none."""
    keys = unread_keys(config)
    if not keys:
        return None
    named = ", ".join(key if len(key) <= _MOST_LETTERS else f"{key[:_MOST_LETTERS]}…" for key in keys[:_MOST_NAMED])
    more = f" and {len(keys) - _MOST_NAMED} more" if len(keys) > _MOST_NAMED else ""
    return (
        f"config.json of the model has what hpcrl neither reads nor knows to be harmless: {named}{more}; if it changes "
        "what the model computes, trainer and engines may differ"
    )


def _checked(arch: type[ModelArch]) -> Iterator[str]:
    """Yield the keys of constants of which the family refuses other values."""
    for key, value in arch.CONSTANTS.items():
        try:
            arch.check_config({key: f"not {value}"})
        except ValueError:
            yield key


def _unread(config: Config, kind: str) -> Iterator[str]:
    read = read_keys(kind)
    for key, value in config.items():
        if value is None or _is_harmless(config, kind, key, value):
            continue
        if isinstance(value, Mapping) and key in _ROPE_GROUPS:
            yield from (f"{key}.{each}" for each in _unread_rope(config, kind, value))
        elif isinstance(value, Mapping) and key == "quantization_config":
            yield from (f"{key}.{each}" for each in _unread_storage(value))
        elif key in _SAME_AS.get(kind, {}) or key not in read or _is_rotary_part(kind, key):
            yield key


def _is_harmless(config: Config, kind: str, key: str, value: Any) -> bool:
    if key in _HARMLESS or _is_id(key) or key in _OF_FAMILY.get(kind, frozenset()):
        return True
    other = _SAME_AS.get(kind, {}).get(key)
    if other is not None and _is_one_of(value, (config.get(other, DEFAULTS[kind].get(other, value)),)):
        return True
    table = _OF_FAMILY_WITH_VALUE.get(kind, {})
    return _is_one_of(value, table[key] if key in table else _WITH_VALUE.get(key, ()))


def _unread_rope(config: Config, kind: str, group: Config) -> Iterator[str]:
    for key, value in group.items():
        if value is None or (key in _OF_ROPE and not _is_rotary_part(kind, key)):
            continue
        if not _is_harmless(config, kind, key, value):
            yield key


def _unread_storage(group: Config) -> Iterator[str]:
    for key, value in group.items():
        if value is None or key in _OF_STORAGE or key in _STORAGE_HARMLESS:
            continue
        if not _is_one_of(value, _STORAGE_WITH_VALUE.get(key, ())):
            yield key


def _is_rotary_part(kind: str, key: str) -> bool:
    """Return whether ``key`` is the share of rotated channels in a family that rotates all of them."""
    arch = _ARCH_OF.get(kind)
    return key == "partial_rotary_factor" and (arch is None or key not in arch.__dataclass_fields__)


def _is_id(key: str) -> bool:
    return key.endswith(_TOKENS)


def _is_one_of(value: Any, allowed: tuple[Any, ...]) -> bool:
    # True is 1 to Python, and another value in a config
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in allowed)
