"""From a Hugging Face ``config.json`` to `ModelFacts`: one function a family of architectures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hpcrl.models.facts import ModelFacts, Naming
from hpcrl.models.layers import DenseMlp, Gqa, Indexer, Layer, Mamba2, Mla, Mlp, Moe
from hpcrl.models.sizes import checked
from hpcrl.models.tensors import Part, Weight

__all__ = ["FAMILIES", "facts_from_config"]

Config = Mapping[str, Any]


def facts_from_config(config: Config, *, name: str) -> ModelFacts:
    """Read the sizes of a ``config.json``.

    Raises
    ------
    ValueError
        The architecture is not known, or sizes are missing or impossible (`hpcrl.models.sizes`).
    """
    config = checked(config)
    # models that also see wrap the language model's config
    config = checked(config.get("text_config", config))
    kind = config.get("model_type")
    family = FAMILIES.get(str(kind))
    if family is None:
        raise ValueError(f"model_type is {kind!r}; known are {', '.join(sorted(FAMILIES))}")
    try:
        return family(config, name)
    except KeyError as error:
        raise ValueError(f"config.json lacks {error.args[0]}") from error


def _common(config: Config, name: str) -> dict[str, Any]:
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    return {
        "name": name,
        "model_type": str(config["model_type"]),
        "vocab_size": int(config["vocab_size"]),
        "hidden_size": int(config["hidden_size"]),
        "max_position_embeddings": int(config["max_position_embeddings"]),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
        "dtype": dtype,
    }


def _norms(hidden_size: int, *names: str) -> tuple[Weight, ...]:
    return tuple(Weight(f"{name}.weight", (hidden_size,), Part.NORM) for name in names)


def _decoder_norms(config: Config) -> tuple[Weight, ...]:
    return _norms(config["hidden_size"], "input_layernorm", "post_attention_layernorm")


# -- Qwen3 ------------------------------------------------------------------------------------------------------


def _gqa(config: Config, *, qk_norm: bool, output_bias: bool) -> Gqa:
    heads = config["num_attention_heads"]
    return Gqa(
        hidden_size=config["hidden_size"],
        num_attention_heads=heads,
        num_key_value_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        qk_norm=qk_norm,
        bias=bool(config.get("attention_bias", False)),
        output_bias=output_bias and bool(config.get("attention_bias", False)),
    )


def _dense(config: Config) -> DenseMlp:
    return DenseMlp(hidden_size=config["hidden_size"], intermediate_size=config["intermediate_size"])


def _qwen3(config: Config, name: str) -> ModelFacts:
    attention = _gqa(config, qk_norm=True, output_bias=True)
    layer = Layer(mixer=attention, mlp=_dense(config), extra=_decoder_norms(config))
    return ModelFacts(**_common(config, name), layers=(layer,) * config["num_hidden_layers"])


def _qwen3_moe(config: Config, name: str) -> ModelFacts:
    attention = _gqa(config, qk_norm=True, output_bias=True)
    moe = Moe(
        hidden_size=config["hidden_size"],
        num_experts=config.get("num_experts") or config["num_local_experts"],
        num_experts_per_tok=config["num_experts_per_tok"],
        moe_intermediate_size=config["moe_intermediate_size"],
    )
    dense = set(config.get("mlp_only_layers") or ())
    every = config.get("decoder_sparse_step", 1)
    layers = (
        Layer(
            mixer=attention,
            mlp=_dense(config) if i in dense or (i + 1) % every else moe,
            extra=_decoder_norms(config),
        )
        for i in range(config["num_hidden_layers"])
    )
    return ModelFacts(**_common(config, name), layers=tuple(layers))


# -- DeepSeek-V3, Kimi K2, GLM ----------------------------------------------------------------------------------


def _mla(config: Config) -> Mla:
    return Mla(
        hidden_size=config["hidden_size"],
        num_attention_heads=config["num_attention_heads"],
        # null: queries are not compressed
        q_lora_rank=config.get("q_lora_rank"),
        kv_lora_rank=config["kv_lora_rank"],
        qk_nope_head_dim=config["qk_nope_head_dim"],
        qk_rope_head_dim=config["qk_rope_head_dim"],
        v_head_dim=config["v_head_dim"],
        bias=bool(config.get("attention_bias", False)),
    )


def _sparse_mla(config: Config) -> tuple[Mla, Mla]:
    """Attention of a layer with an indexer, and of one that takes over the choice of an earlier layer."""
    plain = _mla(config)
    indexer = Indexer(
        hidden_size=config["hidden_size"],
        q_lora_rank=config["q_lora_rank"],
        n_heads=config["index_n_heads"],
        head_dim=config["index_head_dim"],
        topk=config["index_topk"],
    )
    settings = {field: getattr(plain, field) for field in Mla.__dataclass_fields__}
    full = Mla(**{**settings, "indexer": indexer, "topk": indexer.topk})
    shared = Mla(**{**settings, "shares_indexer": True, "topk": indexer.topk})
    return full, shared


def _indexer_types(config: Config) -> list[str]:
    """``full`` or ``shared`` for each layer; GLM-5.2 and later share, by list, pattern or period."""
    layers = config["num_hidden_layers"]
    given = config.get("indexer_types") or config.get("index_topk_pattern")
    if given is not None:
        return [{"F": "full", "S": "shared"}.get(kind, kind) for kind in given]
    period, offset = max(config.get("index_topk_freq") or 1, 1), config.get("index_skip_topk_offset", 2)
    return ["full" if max(i - offset + 1, 0) % period == 0 else "shared" for i in range(layers)]


def _deepseek_moe(config: Config) -> Moe:
    experts = config.get("n_routed_experts") or config["num_experts"]
    return Moe(
        hidden_size=config["hidden_size"],
        num_experts=experts,
        num_experts_per_tok=config["num_experts_per_tok"],
        moe_intermediate_size=config["moe_intermediate_size"],
        shared_intermediate_size=config["moe_intermediate_size"] * (config.get("n_shared_experts") or 0),
        correction_bias=True,
    )


def _is_dense(config: Config, layer: int) -> bool:
    kinds = config.get("mlp_layer_types")
    if kinds is not None:
        return bool(kinds[layer] == "dense")
    default = 1 if config["model_type"] == "glm4_moe_lite" else 0
    return bool(layer < config.get("first_k_dense_replace", default))


def _mtp(config: Config, mixer: Gqa | Mla, mlp: Mlp) -> tuple[Layer, ...]:
    """A layer behind two norms and a projection of hidden state and embedding.

    DeepSeek's checkpoints repeat embedding and head in the module, GLM's from 4.6 on do not. A ``config.json`` does
    not say so: the shipped ones have the key ``mtp_embeddings`` where it is not the family's habit.
    """
    d, v = config["hidden_size"], config["vocab_size"]
    habit = "shared" if config["model_type"] == "glm_moe_dsa" else "own"
    own = config.get("mtp_embeddings", habit) == "own"
    copies = ("embed_tokens", "shared_head.head") if own else ()
    extra = (
        *(Weight(f"{name}.weight", (v, d), Part.MTP, tp_dim=0) for name in copies),
        *(Weight(f"{norm}.weight", (d,), Part.MTP) for norm in ("enorm", "hnorm", "shared_head.norm")),
        Weight("eh_proj.weight", (d, 2 * d), Part.MTP),
        *_decoder_norms(config),
    )
    count = config.get("num_nextn_predict_layers") or 0
    return (Layer(mixer=mixer, mlp=mlp, extra=extra),) * count


def _deepseek(config: Config, name: str) -> ModelFacts:
    """DeepSeek-V3, V3.2 and Kimi K2; GLM-5 and GLM-4.7-Flash have the same layers."""
    moe, dense = _deepseek_moe(config), _dense(config)
    layers = config["num_hidden_layers"]
    if config.get("index_topk"):
        full, shared = _sparse_mla(config)
        kinds = _indexer_types(config)
        if len(kinds) != layers:
            raise ValueError(f"indexer_types names {len(kinds)} layers, num_hidden_layers is {layers}")
        mixers = [full if kind == "full" else shared for kind in kinds]
    else:
        mixers = [_mla(config)] * layers
    blocks = tuple(
        Layer(mixer=mixer, mlp=dense if _is_dense(config, i) else moe, extra=_decoder_norms(config))
        for i, mixer in enumerate(mixers)
    )
    return ModelFacts(**_common(config, name), layers=blocks, mtp_layers=_mtp(config, mixers[0], moe))


def _glm4_moe(config: Config, name: str) -> ModelFacts:
    # query, key and value have biases where attention_bias says so, the output never
    attention = _gqa(config, qk_norm=bool(config.get("use_qk_norm", False)), output_bias=False)
    moe, dense = _deepseek_moe(config), _dense(config)
    layers = tuple(
        Layer(mixer=attention, mlp=dense if _is_dense(config, i) else moe, extra=_decoder_norms(config))
        for i in range(config["num_hidden_layers"])
    )
    return ModelFacts(**_common(config, name), layers=layers, mtp_layers=_mtp(config, attention, moe))


# -- Nemotron-H -------------------------------------------------------------------------------------------------

_BLOCKS = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}
_BLOCK_NAMES = {"linear_attention": "mamba", "full_attention": "attention"}


def _nemotron_blocks(config: Config, listed: str, pattern: str) -> list[str]:
    given = config.get(listed) or config.get("layer_types" if listed == "layers_block_type" else "")
    if given is None:
        letters = str(config[pattern])
        if unknown := set(letters) - _BLOCKS.keys():
            raise ValueError(f"{pattern} has {min(unknown)!r}; known are {' '.join(_BLOCKS)}")
        given = [_BLOCKS[letter] for letter in letters]
    return [_BLOCK_NAMES.get(kind, kind) for kind in given]


def _nemotron_layer(config: Config, kind: str, extra: tuple[Weight, ...] = ()) -> Layer:
    mixer, mlp = _nemotron_modules(config, kind)
    norm = _norms(config["hidden_size"], "norm")
    return Layer(mixer=mixer, mlp=mlp, mixer_prefix="mixer.", mlp_prefix="mixer.", extra=(*extra, *norm))


def _nemotron_modules(config: Config, kind: str) -> tuple[Gqa | Mamba2 | None, Mlp | None]:
    d = config["hidden_size"]
    if kind == "mamba":
        mamba = Mamba2(
            hidden_size=d,
            num_heads=config["mamba_num_heads"],
            head_dim=config["mamba_head_dim"],
            n_groups=config.get("n_groups") or config["mamba_n_groups"],
            state_size=config["ssm_state_size"],
            conv_kernel=config["conv_kernel"],
            chunk_size=config.get("chunk_size", 128),
            conv_bias=bool(config.get("use_conv_bias", True)),
            proj_bias=bool(config.get("use_bias", False)),
        )
        return mamba, None
    if kind == "attention":
        return _gqa({**config, "attention_bias": False}, qk_norm=False, output_bias=False), None
    if kind == "mlp":
        bias = bool(config.get("mlp_bias", False))
        return None, DenseMlp(hidden_size=d, intermediate_size=config["intermediate_size"], gated=False, bias=bias)
    if kind != "moe":
        raise ValueError(f"layers_block_type has {kind!r}; known are mamba, attention, mlp and moe")
    return None, Moe(
        hidden_size=d,
        num_experts=config["n_routed_experts"],
        num_experts_per_tok=config["num_experts_per_tok"],
        moe_intermediate_size=config["moe_intermediate_size"],
        shared_intermediate_size=config["moe_shared_expert_intermediate_size"] * config.get("n_shared_experts", 1),
        gated=False,
        correction_bias=True,
        latent_size=config.get("moe_latent_size"),
    )


def _nemotron_h(config: Config, name: str) -> ModelFacts:
    kinds = _nemotron_blocks(config, "layers_block_type", "hybrid_override_pattern")
    naming = Naming("backbone.embeddings.weight", "backbone.norm_f.weight", "backbone.layers", "mtp.layers")
    layers = tuple(_nemotron_layer(config, kind) for kind in kinds)
    mtp: list[Layer] = []
    if config.get("num_nextn_predict_layers"):
        d = config["hidden_size"]
        ends = _nemotron_blocks(config, "mtp_layers_block_type", "mtp_hybrid_override_pattern")
        first = (
            *(Weight(f"{norm}.weight", (d,), Part.MTP) for norm in ("enorm", "hnorm")),
            Weight("eh_proj.weight", (d, 2 * d), Part.MTP),
        )
        last = (Weight("final_layernorm.weight", (d,), Part.MTP),)
        for i, kind in enumerate(ends):
            extra = (*(first if i == 0 else ()), *(last if i == len(ends) - 1 else ()))
            mtp.append(_nemotron_layer(config, kind, extra))
    return ModelFacts(**_common(config, name), layers=layers, mtp_layers=tuple(mtp), naming=naming)


FAMILIES: dict[str, Callable[[Config, str], ModelFacts]] = {
    "deepseek_v3": _deepseek,
    "deepseek_v32": _deepseek,
    "glm4_moe": _glm4_moe,
    "glm4_moe_lite": _deepseek,
    "glm_moe_dsa": _deepseek,
    "kimi_k2": _deepseek,
    "nemotron_h": _nemotron_h,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
}
"""Reader of each ``model_type``."""
