"""Experts chosen by a sigmoid with a correction bias: DeepSeek-V3 and Kimi K2 (latent attention), GLM-4.5 to 4.7."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from hpcrl.models.arch.base import GroupedQueryArch, KvShape, ModelArch
from hpcrl.models.defaults import DEFAULTS


@dataclass(frozen=True, kw_only=True)
class SigmoidMoeArch(ModelArch):
    """Common architecture of these families: dense layers first, then experts in groups, and shared experts."""

    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int = 1
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    first_k_dense_replace: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.num_experts_per_tok <= self.n_routed_experts:
            raise ValueError(
                f"num_experts_per_tok ({self.num_experts_per_tok}) must be between 1 and "
                f"n_routed_experts ({self.n_routed_experts})"
            )
        if self.n_routed_experts % self.n_group or not 1 <= self.topk_group <= self.n_group:
            raise ValueError(
                f"n_group ({self.n_group}) must divide n_routed_experts ({self.n_routed_experts}), and "
                f"topk_group ({self.topk_group}) be between 1 and n_group"
            )
        size = self.n_routed_experts // self.n_group
        if size < 2 or self.num_experts_per_tok > size * self.topk_group:
            raise ValueError(
                f"{self.topk_group} groups of {size} experts are too few to choose {self.num_experts_per_tok} from; "
                "a group has two experts at least"
            )

    @property
    def routed_experts(self) -> int:
        return self.n_routed_experts

    @property
    def experts_per_token(self) -> int:
        return self.num_experts_per_tok

    def is_sparse(self, layer: int) -> bool:
        return layer >= self.first_k_dense_replace

    @classmethod
    def check_config(cls, config: Mapping[str, Any]) -> None:
        wanted = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "hidden_act": "silu"}
        for key, value in wanted.items():
            if config.get(key, value) != value:
                raise ValueError(f"{key} is {config[key]!r}; this model computes {value!r}")
        if kinds := config.get("mlp_layer_types"):
            dense = int(config.get("first_k_dense_replace", 0))
            if [kind == "dense" for kind in kinds] != [layer < dense for layer in range(len(kinds))]:
                raise ValueError("mlp_layer_types has dense layers that are not the first_k_dense_replace first ones")


@dataclass(frozen=True, kw_only=True)
class DeepseekV3Arch(SigmoidMoeArch):
    """DeepSeek-V3 and Kimi K2: keys and values come from one latent vector a token."""

    MODEL_TYPES: ClassVar[tuple[str, ...]] = ("deepseek_v3", "kimi_k2")
    ARCHITECTURE: ClassVar[str] = "DeepseekV3ForCausalLM"
    # vLLM reads the correction bias only where these say so
    CONSTANTS: ClassVar[Mapping[str, Any]] = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
    NULLABLE: ClassVar[tuple[str, ...]] = ("q_lora_rank",)
    LATENT_NORM_EPS: ClassVar[float] = 1e-6
    """Epsilon of the norms of latents, whatever ``rms_norm_eps`` is: transformers and vLLM's loader do the same."""

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    n_group: int = DEFAULTS["deepseek_v3"]["n_group"]
    topk_group: int = DEFAULTS["deepseek_v3"]["topk_group"]
    routed_scaling_factor: float = DEFAULTS["deepseek_v3"]["routed_scaling_factor"]
    first_k_dense_replace: int = DEFAULTS["deepseek_v3"]["first_k_dense_replace"]
    q_lora_rank: int | None = DEFAULTS["deepseek_v3"]["q_lora_rank"]
    """None: queries are not compressed."""
    rope_interleave: bool = True
    num_key_value_heads: int = 0
    """Stands in every config and says nothing: each head has its own keys and values."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim ({self.qk_rope_head_dim}) must be even for rotary embeddings")

    @property
    def has_latent_attention(self) -> bool:
        return True

    @property
    def kv(self) -> KvShape:
        return KvShape(self.num_attention_heads, self.qk_nope_head_dim + self.qk_rope_head_dim, self.v_head_dim)

    @property
    def rotary_dim(self) -> int:
        return self.qk_rope_head_dim


@dataclass(frozen=True, kw_only=True)
class Glm4MoeArch(SigmoidMoeArch, GroupedQueryArch):
    """GLM-4.5, 4.6 and 4.7: grouped queries, of which only a part of the channels is rotated."""

    MODEL_TYPES: ClassVar[tuple[str, ...]] = ("glm4_moe",)
    ARCHITECTURE: ClassVar[str] = "Glm4MoeForCausalLM"

    rms_norm_eps: float = DEFAULTS["glm4_moe"]["rms_norm_eps"]
    first_k_dense_replace: int = DEFAULTS["glm4_moe"]["first_k_dense_replace"]
    use_qk_norm: bool = False
    partial_rotary_factor: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise ValueError(f"partial_rotary_factor ({self.partial_rotary_factor}) rotates {self.rotary_dim} channels")

    @property
    def qk_norm(self) -> Literal["none", "head", "all"]:
        return "head" if self.use_qk_norm else "none"

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> Glm4MoeArch:
        if config.get("head_dim") is None and config.get("hidden_size") and config.get("num_attention_heads"):
            config = {**config, "head_dim": config["hidden_size"] // config["num_attention_heads"]}
        return super().from_hf_config(config)
