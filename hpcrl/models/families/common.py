"""Common parts of the readers of families: sizes that every config has, norms, attention and dense blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from hpcrl.models.facts import ModelFacts
from hpcrl.models.layers import DenseMlp, Gqa
from hpcrl.models.tensors import Part, Weight

Config = Mapping[str, Any]
Reader = Callable[[Config, str], ModelFacts]
"""Takes a checked config and the name for people."""


def common(config: Config, name: str) -> dict[str, Any]:
    """Return the arguments of `ModelFacts` other than its layers."""
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    storage = config.get("quantization_config") or {}
    return {
        "name": name,
        "model_type": str(config["model_type"]),
        "vocab_size": int(config["vocab_size"]),
        "hidden_size": int(config["hidden_size"]),
        "max_position_embeddings": int(config["max_position_embeddings"]),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
        "dtype": dtype,
        "stored": method if (method := storage.get("quant_method")) in ("fp8", "mxfp4") else "dtype",
    }


def norms(hidden_size: int, *names: str) -> tuple[Weight, ...]:
    """Return the norms over the hidden size."""
    return tuple(Weight(f"{name}.weight", (hidden_size,), Part.NORM) for name in names)


def decoder_norms(config: Config) -> tuple[Weight, ...]:
    """Return the two norms of most decoder layers."""
    return norms(config["hidden_size"], "input_layernorm", "post_attention_layernorm")


def gqa(
    config: Config,
    *,
    qk_norm: Literal["none", "head", "all"] = "none",
    output_bias: bool = True,
    window: int | None = None,
    chunk: int | None = None,
    output_gate: bool = False,
    sinks: bool = False,
    rotary: bool = True,
) -> Gqa:
    """Return attention with the usual keys; ``output_bias``: ``attention_bias`` is of the output too."""
    heads = config["num_attention_heads"]
    bias = bool(config.get("attention_bias", False))
    return Gqa(
        hidden_size=config["hidden_size"],
        num_attention_heads=heads,
        num_key_value_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        qk_norm=qk_norm,
        bias=bias,
        output_bias=output_bias and bias,
        output_gate=output_gate,
        sinks=sinks,
        rotary=rotary,
        window=window,
        chunk=chunk,
    )


def dense(config: Config, width: str = "intermediate_size") -> DenseMlp:
    """Return a dense block for every token, whose width is the value of the key ``width``."""
    return DenseMlp(hidden_size=config["hidden_size"], intermediate_size=config[width])


def layer_types(config: Config, otherwise: Callable[[int], str]) -> list[str]:
    """Return ``layer_types`` of the config; without it, the value of ``otherwise`` for each layer."""
    return list(config.get("layer_types") or map(otherwise, range(config["num_hidden_layers"])))
