"""gpt-oss: attention with sinks, every second layer with a window, and experts with biases and a clamped activation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from hpcrl.models.arch.expert_layers import ExpertLayersArch

_KINDS = ("sliding_attention", "full_attention")
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""Defaults of a config, as in transformers."""


@dataclass(frozen=True, kw_only=True)
class GptOssArch(ExpertLayersArch):
    """gpt-oss 20b and 120b; ``intermediate_size`` is the width of an expert. Defaults are those of transformers.

    Attributes
    ----------
    sliding_window:
        Tokens that a query of a layer with a window sees, itself included.
    layer_types:
        ``sliding_attention`` or ``full_attention`` for each layer; empty for both in turn.
    swiglu_alpha, swiglu_limit:
        Parameters of the activation of experts: see `hpcrl.modeling.layers.moe.ClampedExperts`.
    """

    MODEL_TYPES: ClassVar[tuple[str, ...]] = ("gpt_oss",)
    ARCHITECTURE: ClassVar[str] = "GptOssForCausalLM"

    sliding_window: int
    layer_types: tuple[str, ...] = ()
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    attention_bias: bool = True
    rms_norm_eps: float = 1e-5
    rope_theta: float = 150_000.0

    def __post_init__(self) -> None:
        super().__post_init__()
        kinds = self.layer_types or tuple(_KINDS[layer % 2] for layer in range(self.num_hidden_layers))
        object.__setattr__(self, "layer_types", kinds)
        if unknown := set(kinds) - set(_KINDS):
            raise ValueError(f"layer_types has {min(unknown)!r}; known are {' and '.join(_KINDS)}")
        if len(kinds) != self.num_hidden_layers:
            raise ValueError(f"layer_types names {len(kinds)} layers, num_hidden_layers is {self.num_hidden_layers}")

    @property
    def rotary_dim(self) -> int:
        return self.head_dim

    @property
    def output_bias(self) -> bool:
        return True

    @property
    def sinks(self) -> bool:
        return True

    def window(self, layer: int) -> int | None:
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None

    def to_hf_config(self, dtype: str = "float32") -> dict[str, Any]:
        config = super().to_hf_config(dtype)
        # without the key readers scale frequencies
        rope = config.pop("rope_scaling") or {"rope_type": "default"}
        rope = {**rope, "rope_theta": config.pop("rope_theta")}
        return {**config, "layer_types": list(self.layer_types), "rope_parameters": rope}

    @classmethod
    def check_config(cls, config: Mapping[str, Any]) -> None:
        quantised = (config.get("quantization_config") or {}).get("quant_method")
        if quantised not in (None, "mxfp4"):
            raise ValueError(
                f"its experts are stored in {quantised} (quantization_config), which is not read; known is mxfp4, as "
                "the model is published, or none"
            )

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> GptOssArch:
        found = dict(config)
        for ours, theirs in (("num_local_experts", "num_experts"), ("num_experts_per_tok", "experts_per_token")):
            if found.get(ours) is None and found.get(theirs) is not None:
                found[ours] = found[theirs]
        if not found.get("rope_parameters") and not found.get("rope_scaling"):
            found["rope_parameters"] = dict(_ROPE)
        return super().from_hf_config(found)
