"""Qwen3, dense and sparse, Qwen3-Next and Qwen3.5."""

from __future__ import annotations

from collections.abc import Callable

from hpcrl.models.facts import ModelFacts, Naming
from hpcrl.models.families.common import Config, common, decoder_norms, dense, gqa, layer_types
from hpcrl.models.layers import GatedDeltaNet, Layer, Mlp, Moe
from hpcrl.models.tensors import Part, Weight


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


def delta_layer_types(config: Config) -> list[str]:
    """Return ``linear_attention`` or ``full_attention`` for each layer of a hybrid of delta rule and attention."""
    every = config.get("full_attention_interval") or 4
    return layer_types(config, lambda i: "linear_attention" if (i + 1) % every else "full_attention")


def qwen3_next(config: Config, name: str) -> ModelFacts:
    """Return the facts of Qwen3-Next.

    It has three layers of the gated delta rule to one of gated attention, experts and a gated shared expert in each.

    Its checkpoints have a module of multi-token prediction that its ``config.json`` does not name: shipped ones have
    ``num_nextn_predict_layers``.
    """
    sparse = _sparse_layers(config)
    return _gated_delta(config, name, lambda i: _shared_moe(config) if sparse[i] else dense(config), interleaved=True)


def qwen3_5(config: Config, name: str) -> ModelFacts:
    """Read the facts of the language model of dense Qwen3.5: the mixers of Qwen3-Next, in more matrices."""
    return _gated_delta(config, name, lambda _: dense(config), interleaved=False)


def qwen3_5_moe(config: Config, name: str) -> ModelFacts:
    """Read the facts of the language model of Qwen3.5 with experts, which are in every layer."""
    return _gated_delta(config, name, lambda _: _shared_moe(config), interleaved=False)


def _shared_moe(config: Config) -> Moe:
    return Moe(
        hidden_size=config["hidden_size"],
        num_experts=config["num_experts"],
        num_experts_per_tok=config["num_experts_per_tok"],
        moe_intermediate_size=config["moe_intermediate_size"],
        shared_intermediate_size=config["shared_expert_intermediate_size"],
        shared_prefix="shared_expert.",
        shared_gate=True,
    )


def _gated_delta(config: Config, name: str, mlp: Callable[[int], Mlp], *, interleaved: bool) -> ModelFacts:
    """Return the facts of a hybrid: ``mlp`` makes the block of a layer by its number.

    Modules of multi-token prediction have experts where the model has any.
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
        interleaved=interleaved,
    )
    layers = tuple(
        Layer(
            mixer=linear if kind == "linear_attention" else full,
            mlp=mlp(i),
            mixer_prefix="linear_attn." if kind == "linear_attention" else "self_attn.",
            extra=decoder_norms(config),
        )
        for i, kind in enumerate(delta_layer_types(config))
    )
    count = config.get("num_nextn_predict_layers", 0)
    predicting = _shared_moe(config) if "num_experts" in config else mlp(0)
    mtp = (Layer(mixer=full, mlp=predicting, extra=decoder_norms(config)),) * count
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
