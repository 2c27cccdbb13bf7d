"""gpt-oss and Llama 4: one tensor holds all experts of a layer, and many layers see only tokens nearby."""

from __future__ import annotations

from hpcrl.models.facts import ModelFacts, Naming
from hpcrl.models.families.common import Config, common, decoder_norms, dense, gqa, layer_types
from hpcrl.models.layers import ExpertNames, Layer, Moe

LLAMA4_NAMES = Naming(
    embedding="language_model.model.embed_tokens.weight",
    final_norm="language_model.model.norm.weight",
    layers="language_model.model.layers",
    lm_head="language_model.lm_head.weight",
)
"""Names of published vision-language models; the language model alone has the usual names."""


def gpt_oss(config: Config, name: str) -> ModelFacts:
    """Return the facts of gpt-oss, with experts as transformers saves them, ``[experts, in, out]``.

    Published checkpoints hold experts in MXFP4, as ``*_blocks`` and ``*_scales``; they have the same parameters.
    """
    biased = {**config, "attention_bias": config.get("attention_bias", True)}
    full = gqa(biased, sinks=True)
    windowed = gqa(biased, sinks=True, window=config["sliding_window"])
    moe = Moe(
        hidden_size=config["hidden_size"],
        num_experts=config.get("num_local_experts") or config["num_experts"],
        num_experts_per_tok=config.get("num_experts_per_tok") or config["experts_per_token"],
        moe_intermediate_size=config["intermediate_size"],
        bias=True,
        names=ExpertNames(router="router", fused=True),
    )
    kinds = layer_types(config, lambda i: "full_attention" if i % 2 else "sliding_attention")
    layers = tuple(
        Layer(mixer=full if kind == "full_attention" else windowed, mlp=moe, extra=decoder_norms(config))
        for kind in kinds
    )
    return ModelFacts(**common(config, name), layers=layers)


def llama4(config: Config, name: str) -> ModelFacts:
    """Return the facts of the language model of Llama 4, without its vision part.

    Layers with rotary embeddings attend within their own chunk; those without (every fourth) to all tokens.
    """
    full, chunked = gqa(config), gqa(config, chunk=config.get("attention_chunk_size"))
    moe = Moe(
        hidden_size=config["hidden_size"],
        num_experts=config["num_local_experts"],
        num_experts_per_tok=config["num_experts_per_tok"],
        moe_intermediate_size=config["intermediate_size"],
        shared_intermediate_size=config["intermediate_size"],
        shared_prefix="shared_expert.",
        names=ExpertNames(router="router", fused=True),
    )
    every = config.get("no_rope_layer_interval", 4)
    rotary = config.get("no_rope_layers") or [(i + 1) % every for i in range(config["num_hidden_layers"])]
    kinds = layer_types(config, lambda i: "chunked_attention" if rotary[i] else "full_attention")
    step = config.get("interleave_moe_layer_step", 1)
    sparse = set(config.get("moe_layers", range(step - 1, config["num_hidden_layers"], step)))
    layers = tuple(
        Layer(
            mixer=full if kind == "full_attention" else chunked,
            mlp=moe if i in sparse else dense(config, "intermediate_size_mlp"),
            mlp_prefix="feed_forward.",
            extra=decoder_norms(config),
        )
        for i, kind in enumerate(kinds)
    )
    return ModelFacts(**common(config, name), layers=layers)
