"""Mixtral, and MiniMax-M2 which has its names: experts of ``w1`` (gate), ``w3`` (up) and ``w2`` (down)."""

from __future__ import annotations

from hpcrl.models.facts import ModelFacts
from hpcrl.models.families.common import Config, common, decoder_norms, gqa
from hpcrl.models.layers import ExpertNames, Gqa, Layer, Moe

_NAMES = ExpertNames(gate="w1", up="w3", down="w2", correction_bias="e_score_correction_bias")


def mixtral(config: Config, name: str) -> ModelFacts:
    """Return the facts of Mixtral; a window, where the config has one, is of every layer."""
    return _facts(config, name, gqa(_unbiased(config), window=config.get("sliding_window")), correction_bias=False)


def minimax_m2(config: Config, name: str) -> ModelFacts:
    """Return the facts of MiniMax-M2.

    Its checkpoints lack the modules of multi-token prediction that its config names.
    """
    attention = gqa(_unbiased(config), qk_norm="all" if config.get("use_qk_norm", True) else "none")
    return _facts(config, name, attention, correction_bias=True)


def _unbiased(config: Config) -> Config:
    # their attention has no biases, whatever else a config says
    return {**config, "attention_bias": False}


def _facts(config: Config, name: str, attention: Gqa, *, correction_bias: bool) -> ModelFacts:
    moe = Moe(
        hidden_size=config["hidden_size"],
        num_experts=config.get("num_local_experts") or config["num_experts"],
        num_experts_per_tok=config["num_experts_per_tok"],
        moe_intermediate_size=config["intermediate_size"],
        correction_bias=correction_bias,
        correction_bias_dtype=None,
        names=_NAMES,
    )
    layer = Layer(mixer=attention, mlp=moe, mlp_prefix="block_sparse_moe.", extra=decoder_norms(config))
    return ModelFacts(**common(config, name), layers=(layer,) * config["num_hidden_layers"])
