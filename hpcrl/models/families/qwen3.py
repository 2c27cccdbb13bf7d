"""Qwen3, dense and sparse, and Qwen3-Next."""

from __future__ import annotations

from hpcrl.models.facts import ModelFacts, Naming
from hpcrl.models.families.common import Config, common, decoder_norms, dense, gqa, layer_types
from hpcrl.models.layers import GatedDeltaNet, Layer, Moe
from hpcrl.models.tensors import Part, Weight

__all__ = ["qwen3", "qwen3_moe", "qwen3_next"]


def qwen3(config: Config, name: str) -> ModelFacts:
    """Read the facts of dense Qwen3."""
    attention = gqa(config, qk_norm="head")
    layer = Layer(mixer=attention, mlp=dense(config), extra=decoder_norms(config))
    return ModelFacts(**common(config, name), layers=(layer,) * config["num_hidden_layers"])


def qwen3_moe(config: Config, name: str) -> ModelFacts:
    """Read the facts of Qwen3 with experts."""
    attention = gqa(config, qk_norm="head")
    moe = Moe(
        hidden_size=config["hidden_size"],
        num_experts=config.get("num_experts") or config["num_local_experts"],
        num_experts_per_tok=config["num_experts_per_tok"],
        moe_intermediate_size=config["moe_intermediate_size"],
    )
    layers = tuple(
        Layer(mixer=attention, mlp=moe if sparse else dense(config), extra=decoder_norms(config))
        for sparse in _sparse_layers(config)
    )
    return ModelFacts(**common(config, name), layers=layers)


def _sparse_layers(config: Config) -> list[bool]:
    only, every = set(config.get("mlp_only_layers") or ()), config.get("decoder_sparse_step", 1)
    return [i not in only and (i + 1) % every == 0 for i in range(config["num_hidden_layers"])]


def qwen3_next(config: Config, name: str) -> ModelFacts:
    """Three layers of the gated delta rule to one of gated attention, experts and a gated shared expert in each.

    Its checkpoints have a module of multi-token prediction that its ``config.json`` does not name: shipped ones have
    ``num_nextn_predict_layers``.
    """
    full = gqa(config, qk_norm="head", output_gate=True)
    linear = GatedDeltaNet(
        hidden_size=config["hidden_size"],
        num_key_heads=config["linear_num_key_heads"],
        num_value_heads=config["linear_num_value_heads"],
        key_head_dim=config["linear_key_head_dim"],
        value_head_dim=config["linear_value_head_dim"],
        conv_kernel=config["linear_conv_kernel_dim"],
        state_dtype=config.get("mamba_ssm_dtype"),
    )
    moe = Moe(
        hidden_size=config["hidden_size"],
        num_experts=config["num_experts"],
        num_experts_per_tok=config["num_experts_per_tok"],
        moe_intermediate_size=config["moe_intermediate_size"],
        shared_intermediate_size=config["shared_expert_intermediate_size"],
        shared_prefix="shared_expert.",
        shared_gate=True,
    )
    every = config.get("full_attention_interval", 4)
    kinds = layer_types(config, lambda i: "linear_attention" if (i + 1) % every else "full_attention")
    layers = tuple(
        Layer(
            mixer=linear if kind == "linear_attention" else full,
            mlp=moe if sparse else dense(config),
            mixer_prefix="linear_attn." if kind == "linear_attention" else "self_attn.",
            extra=decoder_norms(config),
        )
        for kind, sparse in zip(kinds, _sparse_layers(config), strict=True)
    )
    mtp = (Layer(mixer=full, mlp=moe, extra=decoder_norms(config)),) * config.get("num_nextn_predict_layers", 0)
    d = config["hidden_size"]
    outer = (
        Weight("mtp.fc.weight", (d, 2 * d), Part.MTP),
        *(Weight(f"mtp.{n}.weight", (d,), Part.MTP) for n in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")),
    )
    return ModelFacts(
        **common(config, name),
        layers=layers,
        mtp_layers=mtp,
        mtp_outer=outer if mtp else (),
        naming=Naming(mtp_layers="mtp.layers"),
    )
