"""What a Hugging Face ``config.json`` says about a Qwen3-MoE decoder: shapes, names, parameter counts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpcrl.models.facts import ModelFacts
from hpcrl.models.families import facts_from_config
from hpcrl.models.tensors import TensorSpec

__all__ = ["ModelArch", "load_arch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelArch:
    """The sizes of a Qwen3-MoE decoder; field names are those of transformers' ``Qwen3MoeConfig``.

    Every layer is a sparse layer (``decoder_sparse_step=1``, no ``mlp_only_layers``).
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    moe_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    max_position_embeddings: int
    norm_topk_prob: bool = True
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ValueError(
                f"num_experts_per_tok ({self.num_experts_per_tok}) must be between 1 and "
                f"num_experts ({self.num_experts})"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim ({self.head_dim}) must be even for rotary embeddings")

    @property
    def facts(self) -> ModelFacts:
        """Everything else that can be known of this model."""
        return facts_from_config(self.to_hf_config(), name="qwen3_moe")

    def tensors(self) -> Iterator[TensorSpec]:
        """Every tensor of a published checkpoint, by its Hugging Face name."""
        return self.facts.tensors()

    def num_parameters(self) -> int:
        """Parameters of the published checkpoint (tied embeddings counted once)."""
        return self.facts.num_parameters()

    def to_hf_config(self, dtype: str = "float32") -> dict[str, Any]:
        """The ``config.json`` that transformers and vLLM read."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "decoder_sparse_step": 1,
            "dtype": dtype,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            # no dense layer exists, but the field is required by readers
            "intermediate_size": self.moe_intermediate_size,
            "mlp_only_layers": [],
            "output_router_logits": False,
            "router_aux_loss_coef": 0.0,
            "sliding_window": None,
            "use_cache": True,
            "use_sliding_window": False,
            **asdict(self),
        }

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> ModelArch:
        """Read a ``config.json``.

        Raises
        ------
        ValueError
            The architecture is not a fully sparse Qwen3-MoE, or a size is missing.
        """
        kind = config.get("model_type")
        if kind != "qwen3_moe":
            raise ValueError(f"model_type is {kind!r}; this engine and trainer know 'qwen3_moe'")
        if config.get("decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers"):
            raise ValueError("dense layers (decoder_sparse_step > 1 or mlp_only_layers) are not supported")
        if config.get("rope_scaling") or config.get("attention_bias") or config.get("use_sliding_window"):
            raise ValueError("rope_scaling, attention_bias and use_sliding_window are not supported")
        # transformers 5 writes rope_parameters, earlier versions rope_theta
        rope = config.get("rope_parameters") or {}
        values = {name: config[name] for name in cls.__dataclass_fields__ if name in config}
        if "rope_theta" in rope:
            values["rope_theta"] = rope["rope_theta"]
        missing = [
            name
            for name, field in cls.__dataclass_fields__.items()
            if name not in values and field.default is field.default_factory
        ]
        if missing:
            raise ValueError(f"config.json lacks {', '.join(missing)}")
        return cls(**values)


def load_arch(model_dir: Path) -> ModelArch:
    """Read ``model_dir/config.json``.

    Raises
    ------
    FileNotFoundError
        There is no ``config.json``.
    ValueError
        It is not a model this project can run (the message names the file).
    """
    path = model_dir / "config.json"
    with path.open(encoding="utf-8") as stream:
        config = json.load(stream)
    try:
        return ModelArch.from_hf_config(config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
