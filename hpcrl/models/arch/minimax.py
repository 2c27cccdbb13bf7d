"""MiniMax-M2: grouped queries with norms over all heads, and experts chosen by a sigmoid in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from hpcrl.models.arch.expert_layers import ExpertLayersArch


@dataclass(frozen=True, kw_only=True)
class MinimaxM2Arch(ExpertLayersArch):
    """MiniMax-M2; ``intermediate_size`` is the width of an expert. Defaults are those of transformers."""

    MODEL_TYPES: ClassVar[tuple[str, ...]] = ("minimax_m2",)
    ARCHITECTURE: ClassVar[str] = "MiniMaxM2ForCausalLM"
    # vLLM reads the correction bias and the norms only where these say so
    CONSTANTS: ClassVar[Mapping[str, Any]] = {
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "shared_intermediate_size": 0,
    }

    rope_theta: float = 5_000_000.0
    partial_rotary_factor: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise ValueError(f"partial_rotary_factor ({self.partial_rotary_factor}) rotates {self.rotary_dim} channels")

    @property
    def qk_norm(self) -> Literal["none", "head", "all"]:
        return "all"

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    def to_hf_config(self, dtype: str = "float32") -> dict[str, Any]:
        return {**super().to_hf_config(dtype), "rotary_dim": self.rotary_dim}

    @classmethod
    def check_config(cls, config: Mapping[str, Any]) -> None:
        wanted: dict[str, Any] = {**cls.CONSTANTS, "attention_bias": False, "router_jitter_noise": 0.0}
        for key, value in wanted.items():
            if config.get(key, value) != value:
                raise ValueError(f"{key} is {config[key]!r}; this model computes {value!r}")
        if not all(kind == 1 for kind in config.get("attn_type_list", ())):
            raise ValueError("attn_type_list has layers without full attention (1)")

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> MinimaxM2Arch:
        found = dict(config)
        if found.get("num_local_experts") is None and found.get("num_experts") is not None:
            found["num_local_experts"] = found["num_experts"]
        rope = found.get("rope_parameters") or {}
        if found.get("rotary_dim") and found.get("head_dim") and "partial_rotary_factor" not in {**found, **rope}:
            # the form of published configs
            found["partial_rotary_factor"] = found["rotary_dim"] / found["head_dim"]
        # published checkpoints lack the modules of multi-token prediction that their config names
        modules = found.get("num_mtp_modules", found.get("num_nextn_predict_layers")) or 0
        return super().from_hf_config(
            {**found, "num_nextn_predict_layers": modules if found.get("use_mtp", True) else 0}
        )
