"""Qwen3: grouped-query attention with norms of queries and keys; dense, or with experts chosen by a softmax."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from hpcrl.models.arch.base import GroupedQueryArch
from hpcrl.models.defaults import DEFAULTS


@dataclass(frozen=True, kw_only=True)
class _Qwen3(GroupedQueryArch):
    """Common architecture of the dense and the sparse models of Qwen3."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_dim % 2:
            raise ValueError(f"head_dim ({self.head_dim}) must be even for rotary embeddings")

    @property
    def rotary_dim(self) -> int:
        return self.head_dim

    @property
    def qk_norm(self) -> Literal["none", "head", "all"]:
        return "head"

    @property
    def output_bias(self) -> bool:
        return True

    @classmethod
    def check_config(cls, config: Mapping[str, Any]) -> None:
        if config.get("use_sliding_window") or {*config.get("layer_types", ())} - {"full_attention"}:
            raise ValueError("sliding windows (use_sliding_window) are not supported")


@dataclass(frozen=True, kw_only=True)
class Qwen3Arch(_Qwen3):
    """The architecture of dense Qwen3."""

    MODEL_TYPES: ClassVar[tuple[str, ...]] = ("qwen3",)
    ARCHITECTURE: ClassVar[str] = "Qwen3ForCausalLM"
    CONSTANTS: ClassVar[Mapping[str, Any]] = {"sliding_window": None, "use_sliding_window": False}

    intermediate_size: int


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeArch(_Qwen3):
    """Qwen3 with experts in every ``decoder_sparse_step``-th layer that is none of ``mlp_only_layers``."""

    MODEL_TYPES: ClassVar[tuple[str, ...]] = ("qwen3_moe",)
    ARCHITECTURE: ClassVar[str] = "Qwen3MoeForCausalLM"
    CONSTANTS: ClassVar[Mapping[str, Any]] = {
        "output_router_logits": False,
        "router_aux_loss_coef": 0.0,
        "sliding_window": None,
        "use_sliding_window": False,
    }

    moe_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool = DEFAULTS["qwen3_moe"]["norm_topk_prob"]
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    intermediate_size: int = DEFAULTS["qwen3_moe"]["intermediate_size"]
    """Width of dense layers; the field is required by readers also where there are none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ValueError(
                f"num_experts_per_tok ({self.num_experts_per_tok}) must be between 1 and "
                f"num_experts ({self.num_experts})"
            )
        if not self.intermediate_size:
            if not all(self.is_sparse(layer) for layer in range(self.num_hidden_layers)):
                raise ValueError("config.json lacks intermediate_size, the width of its dense layers")
            object.__setattr__(self, "intermediate_size", self.moe_intermediate_size)

    @property
    def routed_experts(self) -> int:
        return self.num_experts

    @property
    def experts_per_token(self) -> int:
        return self.num_experts_per_tok

    def is_sparse(self, layer: int) -> bool:
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0

    def to_hf_config(self, dtype: str = "float32") -> dict[str, Any]:
        return {**super().to_hf_config(dtype), "mlp_only_layers": list(self.mlp_only_layers)}

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> Qwen3MoeArch:
        # transformers 5 has a second name for the same
        if config.get("num_experts") is None and config.get("num_local_experts") is not None:
            config = {**config, "num_experts": config["num_local_experts"]}
        return super().from_hf_config(config)
