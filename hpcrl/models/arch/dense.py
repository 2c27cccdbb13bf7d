"""Dense decoders with grouped-query attention and a gated block: Qwen2 and Qwen2.5, Llama and SmolLM2, Mistral."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from hpcrl.models.arch.base import GroupedQueryArch
from hpcrl.models.defaults import DEFAULTS


@dataclass(frozen=True, kw_only=True)
class DenseArch(GroupedQueryArch):
    """Common architecture of these families: all channels of a head are rotated, and every layer has one gated block.

    Attributes
    ----------
    intermediate_size:
        Width of the gated block.
    """

    COMPUTED: ClassVar[Mapping[str, Any]] = {}
    """Keys of which one value alone is computed; other values are refused."""

    intermediate_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_dim % 2:
            raise ValueError(f"head_dim ({self.head_dim}) must be even for rotary embeddings")

    @property
    def rotary_dim(self) -> int:
        return self.head_dim

    @classmethod
    def check_config(cls, config: Mapping[str, Any]) -> None:
        for key, value in cls.COMPUTED.items():
            if config.get(key, value) != value:
                raise ValueError(f"{key} is {config[key]!r}; this model computes {value!r}")


@dataclass(frozen=True, kw_only=True)
class Qwen2Arch(DenseArch):
    """Qwen2 and Qwen2.5: queries, keys and values have biases in every model, the output projection has none."""

    MODEL_TYPES: ClassVar[tuple[str, ...]] = ("qwen2",)
    ARCHITECTURE: ClassVar[str] = "Qwen2ForCausalLM"
    CONSTANTS: ClassVar[Mapping[str, Any]] = {"sliding_window": None, "use_sliding_window": False}
    # transformers has the biases whatever this key says
    COMPUTED: ClassVar[Mapping[str, Any]] = {"attention_bias": True}

    attention_bias: bool = True

    @classmethod
    def check_config(cls, config: Mapping[str, Any]) -> None:
        super().check_config(config)
        if config.get("use_sliding_window") or {*config.get("layer_types", ())} - {"full_attention"}:
            raise ValueError("sliding windows (use_sliding_window) are not supported")


@dataclass(frozen=True, kw_only=True)
class LlamaArch(DenseArch):
    """Llama 2 to 3.3, SmolLM2, and others that are published as ``LlamaForCausalLM``."""

    MODEL_TYPES: ClassVar[tuple[str, ...]] = ("llama",)
    ARCHITECTURE: ClassVar[str] = "LlamaForCausalLM"
    COMPUTED: ClassVar[Mapping[str, Any]] = {"mlp_bias": False}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size ({self.hidden_size}) is not a multiple of num_attention_heads "
                f"({self.num_attention_heads}), "
                "which transformers refuses of Llama also where head_dim is given"
            )

    @property
    def output_bias(self) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class MistralArch(DenseArch):
    """Mistral 7B, Nemo and Small; defaults are those of transformers.

    Attributes
    ----------
    sliding_window:
        Tokens that a query of every layer sees, itself included; None for all before it.
    """

    MODEL_TYPES: ClassVar[tuple[str, ...]] = ("mistral",)
    ARCHITECTURE: ClassVar[str] = "MistralForCausalLM"
    NULLABLE: ClassVar[tuple[str, ...]] = ("sliding_window",)
    COMPUTED: ClassVar[Mapping[str, Any]] = {"attention_bias": False}

    sliding_window: int | None = DEFAULTS["mistral"]["sliding_window"]

    def window(self, layer: int) -> int | None:
        return self.sliding_window

    @classmethod
    def check_config(cls, config: Mapping[str, Any]) -> None:
        super().check_config(config)
        if config.get("layer_types") and config.get("sliding_window") is not None:
            raise ValueError(
                "layer_types and sliding_window are both set, and transformers gives every layer the window; leave "
                "layer_types out, or set sliding_window to null"
            )
