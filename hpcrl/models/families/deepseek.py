"""DeepSeek-V3, Kimi K2 and GLM from 4.5 on: latent or grouped attention, and experts chosen with a bias."""

from __future__ import annotations

from hpcrl.models.facts import ModelFacts
from hpcrl.models.families.common import Config, common, decoder_norms, dense, gqa
from hpcrl.models.layers import Gqa, Indexer, Layer, Mla, Mlp, Moe
from hpcrl.models.tensors import Part, Weight


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
    """Return the attention of a layer with an indexer, and of one that takes over the choice of an earlier layer."""
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
    shared = Mla(**{**settings, "topk": indexer.topk})
    return full, shared


def indexer_types(config: Config) -> list[str]:
    """Return ``full`` or ``shared`` for each layer; GLM-5.2 and later share, by list, pattern or period.

    ValueError where the pattern is empty.
    """
    layers = config["num_hidden_layers"]
    given = config.get("indexer_types") or config.get("index_topk_pattern")
    if given is not None:
        if not given:
            raise ValueError(f"index_topk_pattern is {given!r}; it names no layer")
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
    if kinds:
        return bool(kinds[layer] == "dense")
    # like transformers, which ignores first_k_dense_replace of GLM-4.7-Flash: by default the first layer is dense
    return bool(layer < config.get("first_k_dense_replace", 1))


def _mtp(config: Config, mixer: Gqa | Mla, mlp: Mlp) -> tuple[Layer, ...]:
    """Return a layer behind two norms and a projection of hidden state and embedding.

    DeepSeek's checkpoints repeat embedding and head in the module, GLM's from 4.6 on do not. A ``config.json`` does
    not record that: the shipped ones have the key ``mtp_embeddings`` where the family's default does not apply.
    """
    d, v = config["hidden_size"], config["vocab_size"]
    habit = "shared" if config["model_type"] == "glm_moe_dsa" else "own"
    own = config.get("mtp_embeddings", habit) == "own"
    copies = ("embed_tokens", "shared_head.head") if own else ()
    extra = (
        *(Weight(f"{name}.weight", (v, d), Part.MTP, tp_dim=0) for name in copies),
        *(Weight(f"{norm}.weight", (d,), Part.MTP) for norm in ("enorm", "hnorm", "shared_head.norm")),
        Weight("eh_proj.weight", (d, 2 * d), Part.MTP),
        *decoder_norms(config),
    )
    count = config.get("num_nextn_predict_layers") or 0
    return (Layer(mixer=mixer, mlp=mlp, extra=extra),) * count


def deepseek(config: Config, name: str) -> ModelFacts:
    """Return the facts of DeepSeek-V3, V3.2 and Kimi K2; GLM-5 and GLM-4.7-Flash have the same layers.

    ValueError where ``config`` names kinds of indexers for another number of layers.
    """
    moe, block = _deepseek_moe(config), dense(config)
    layers = config["num_hidden_layers"]
    if config.get("index_topk"):
        full, shared = _sparse_mla(config)
        kinds = indexer_types(config)
        if len(kinds) != layers:
            raise ValueError(f"indexer_types names {len(kinds)} layers, num_hidden_layers is {layers}")
        mixers = [full if kind == "full" else shared for kind in kinds]
    else:
        mixers = [_mla(config)] * layers
    blocks = tuple(
        Layer(mixer=mixer, mlp=block if _is_dense(config, i) else moe, extra=decoder_norms(config))
        for i, mixer in enumerate(mixers)
    )
    return ModelFacts(**common(config, name), layers=blocks, mtp_layers=_mtp(config, mixers[0], moe))


def glm4_moe(config: Config, name: str) -> ModelFacts:
    """Return the facts of GLM-4.5, 4.6 and 4.7."""
    # query, key and value have biases where attention_bias says so, the output never
    attention = gqa(config, qk_norm="head" if config.get("use_qk_norm", False) else "none", output_bias=False)
    moe, block = _deepseek_moe(config), dense(config)
    layers = tuple(
        Layer(mixer=attention, mlp=block if _is_dense(config, i) else moe, extra=decoder_norms(config))
        for i in range(config["num_hidden_layers"])
    )
    return ModelFacts(**common(config, name), layers=layers, mtp_layers=_mtp(config, attention, moe))
