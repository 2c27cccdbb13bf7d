"""Qwen2 and Qwen2.5, Llama and SmolLM2, Mistral: grouped queries and one gated block in every layer."""

from __future__ import annotations

from hpcrl.models.facts import ModelFacts
from hpcrl.models.families.common import Config, common, decoder_norms, gqa
from hpcrl.models.layers import DenseMlp, Gqa, Layer


def qwen2(config: Config, name: str) -> ModelFacts:
    """Read the facts of Qwen2 and Qwen2.5, whose queries, keys and values have biases whatever a config says."""
    return _facts(config, name, gqa({**config, "attention_bias": True}, output_bias=False))


def llama(config: Config, name: str) -> ModelFacts:
    """Read the facts of Llama and SmolLM2; ``attention_bias`` is of the output projection too."""
    return _facts(config, name, gqa(config), bias=bool(config.get("mlp_bias", False)))


def mistral(config: Config, name: str) -> ModelFacts:
    """Read the facts of Mistral; a window, where the config has one, is of every layer."""
    return _facts(config, name, gqa({**config, "attention_bias": False}, window=config.get("sliding_window")))


def _facts(config: Config, name: str, attention: Gqa, *, bias: bool = False) -> ModelFacts:
    block = DenseMlp(hidden_size=config["hidden_size"], intermediate_size=config["intermediate_size"], bias=bias)
    layer = Layer(mixer=attention, mlp=block, extra=decoder_norms(config))
    return ModelFacts(**common(config, name), layers=(layer,) * config["num_hidden_layers"])
