"""Qwen3-Next and Qwen3.5: layers of the gated delta rule, and of gated attention in between; dense, or with experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from hpcrl.models.arch.base import GroupedQueryArch, StateShape
from hpcrl.models.defaults import DEFAULTS
from hpcrl.models.families.qwen3 import delta_layer_types

_DEFAULTS = DEFAULTS["qwen3_next"]


@dataclass(frozen=True, kw_only=True)
class GatedDeltaArch(GroupedQueryArch):
    """Common architecture of these families.

    Attributes
    ----------
    layer_types:
        ``linear_attention`` or ``full_attention`` for each layer; where a config names none, every
        ``full_attention_interval``-th layer has full attention.
    mamba_ssm_dtype:
        Dtype in which vLLM keeps the states of sequences; None: the dtype of the model. Trainer and embedded engine
        keep them in float32.
    """

    INTERLEAVED: ClassVar[bool] = False
    """Whether projections of the delta rule are published together, by key heads, and not one by one."""

    layer_types: tuple[str, ...] = ()
    linear_num_key_heads: int = _DEFAULTS["linear_num_key_heads"]
    linear_num_value_heads: int = _DEFAULTS["linear_num_value_heads"]
    linear_key_head_dim: int = _DEFAULTS["linear_key_head_dim"]
    linear_value_head_dim: int = _DEFAULTS["linear_value_head_dim"]
    linear_conv_kernel_dim: int = _DEFAULTS["linear_conv_kernel_dim"]
    partial_rotary_factor: float = 0.25
    mamba_ssm_dtype: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        kinds = self.layer_types or delta_layer_types({"num_hidden_layers": self.num_hidden_layers})
        object.__setattr__(self, "layer_types", tuple(kinds))
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types names {len(self.layer_types)} layers, num_hidden_layers is {self.num_hidden_layers}"
            )
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise ValueError(
                f"linear_num_value_heads ({self.linear_num_value_heads}) must be a multiple of "
                f"linear_num_key_heads ({self.linear_num_key_heads})"
            )
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise ValueError(f"partial_rotary_factor ({self.partial_rotary_factor}) rotates {self.rotary_dim} channels")

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def qk_norm(self) -> Literal["none", "head", "all"]:
        return "head"

    @property
    def output_bias(self) -> bool:
        return True

    @property
    def output_gate(self) -> bool:
        return True

    @property
    def zero_centred_norms(self) -> bool:
        return True

    @property
    def key_size(self) -> int:
        """Return the width of all queries of the delta rule, and of all keys."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_size(self) -> int:
        """Return the width of all values of the delta rule."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def kv_layers(self) -> tuple[int, ...]:
        return self._layers("full_attention")

    @property
    def state(self) -> StateShape:
        conv = (self.linear_conv_kernel_dim - 1, 2 * self.key_size + self.value_size)
        recurrent = (self.linear_num_value_heads, self.linear_key_head_dim, self.linear_value_head_dim)
        return StateShape(self._layers("linear_attention"), conv, recurrent)

    def _layers(self, kind: str) -> tuple[int, ...]:
        return tuple(i for i, own in enumerate(self.layer_types) if own == kind)

    def to_hf_config(self, dtype: str = "float32") -> dict[str, Any]:
        return {**super().to_hf_config(dtype), "layer_types": list(self.layer_types)}

    @classmethod
    def check_config(cls, config: Mapping[str, Any]) -> None:
        if config.get("use_sliding_window"):
            raise ValueError("sliding windows (use_sliding_window) are not supported")
        if not config.get("attn_output_gate", True):
            raise ValueError("attn_output_gate is False; this model computes attention with a gate of its output")

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> Self:
        found = dict(config)
        if isinstance(found.get("num_hidden_layers"), int):
            found["layer_types"] = delta_layer_types(found)
        if found.get("num_nextn_predict_layers") is None:
            # published configs of Qwen3-Next do not name the module that published weights have
            found["num_nextn_predict_layers"] = 1
        return super().from_hf_config(found)


@dataclass(frozen=True, kw_only=True)
class _GatedDeltaMoeArch(GatedDeltaArch):
    """With experts that a softmax chooses, and a shared expert behind a gate."""

    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ValueError(
                f"num_experts_per_tok ({self.num_experts_per_tok}) must be between 1 and "
                f"num_experts ({self.num_experts})"
            )

    @property
    def routed_experts(self) -> int:
        return self.num_experts

    @property
    def experts_per_token(self) -> int:
        return self.num_experts_per_tok

    @property
    def normalises_weights(self) -> bool:
        """Return whether the weights of a token's experts add up to 1."""
        return True

    def is_sparse(self, layer: int) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class Qwen3NextArch(_GatedDeltaMoeArch):
    """Qwen3-Next, with experts in every ``decoder_sparse_step``-th layer that is none of ``mlp_only_layers``."""

    MODEL_TYPES: ClassVar[tuple[str, ...]] = ("qwen3_next",)
    ARCHITECTURE: ClassVar[str] = "Qwen3NextForCausalLM"
    CONSTANTS: ClassVar[Mapping[str, Any]] = {"output_router_logits": False, "router_aux_loss_coef": 0.0}
    INTERLEAVED: ClassVar[bool] = True

    intermediate_size: int = _DEFAULTS["intermediate_size"]
    """Width of dense layers; the field is required by readers also where there are none."""
    norm_topk_prob: bool = _DEFAULTS["norm_topk_prob"]
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()

    @property
    def normalises_weights(self) -> bool:
        return self.norm_topk_prob

    def is_sparse(self, layer: int) -> bool:
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0

    def to_hf_config(self, dtype: str = "float32") -> dict[str, Any]:
        return {**super().to_hf_config(dtype), "mlp_only_layers": list(self.mlp_only_layers)}


@dataclass(frozen=True, kw_only=True)
class Qwen35Arch(GatedDeltaArch):
    """The language models of dense Qwen3.5, and of others published by its name."""

    MODEL_TYPES: ClassVar[tuple[str, ...]] = ("qwen3_5_text",)
    ARCHITECTURE: ClassVar[str] = "Qwen3_5ForCausalLM"

    intermediate_size: int


@dataclass(frozen=True, kw_only=True)
class Qwen35MoeArch(_GatedDeltaMoeArch):
    """The language models of Qwen3.5 with experts, which are in every layer."""

    MODEL_TYPES: ClassVar[tuple[str, ...]] = ("qwen3_5_moe_text",)
    ARCHITECTURE: ClassVar[str] = "Qwen3_5MoeForCausalLM"
    CONSTANTS: ClassVar[Mapping[str, Any]] = {"output_router_logits": False, "router_aux_loss_coef": 0.0}
