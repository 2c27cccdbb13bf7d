"""GLM-5: DeepSeek-V3's layers with sparse attention over the tokens that an indexer chooses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from hpcrl.models.arch.base import KvShape
from hpcrl.models.arch.deepseek import DeepseekV3Arch
from hpcrl.models.defaults import DEFAULTS
from hpcrl.models.families.deepseek import indexer_types

_KINDS = ("full", "shared")


@dataclass(frozen=True, kw_only=True)
class GlmMoeDsaArch(DeepseekV3Arch):
    """GLM-5 and later: defaults are those of transformers.

    Attributes
    ----------
    index_topk:
        Tokens that a query attends to at most.
    index_n_heads, index_head_dim:
        Heads of the indexer, and their size.
    indexer_types:
        ``full`` for a layer with an indexer, ``shared`` for one that takes over what an earlier layer has chosen; empty
        for ``full`` everywhere.
    """

    MODEL_TYPES: ClassVar[tuple[str, ...]] = ("glm_moe_dsa",)
    ARCHITECTURE: ClassVar[str] = "GlmMoeDsaForCausalLM"

    rms_norm_eps: float = 1e-5
    n_group: int = DEFAULTS["glm_moe_dsa"]["n_group"]
    topk_group: int = DEFAULTS["glm_moe_dsa"]["topk_group"]
    q_lora_rank: int | None = DEFAULTS["glm_moe_dsa"]["q_lora_rank"]
    index_topk: int = 2048
    index_n_heads: int = 32
    index_head_dim: int = 128
    indexer_types: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        kinds = self.indexer_types or ("full",) * self.num_hidden_layers
        object.__setattr__(self, "indexer_types", kinds)
        if unknown := set(kinds) - set(_KINDS):
            raise ValueError(f"indexer_types has {min(unknown)!r}; known are {' and '.join(_KINDS)}")
        if len(kinds) != self.num_hidden_layers:
            raise ValueError(f"indexer_types names {len(kinds)} layers, num_hidden_layers is {self.num_hidden_layers}")
        if kinds[0] != "full":
            raise ValueError("indexer_types begins with 'shared', and there is no layer before it to share with")
        if self.q_lora_rank is None:
            raise ValueError("q_lora_rank is missing: the indexer reads compressed queries")
        if self.index_head_dim < self.qk_rope_head_dim:
            raise ValueError(
                f"index_head_dim ({self.index_head_dim}) is less than the qk_rope_head_dim ({self.qk_rope_head_dim}) "
                "channels that are rotated"
            )

    @property
    def kv(self) -> KvShape:
        """Return the shape of the latent with its rotary key, once for all heads, and of the indexer's key."""
        return KvShape(1, self.kv_lora_rank + self.qk_rope_head_dim, self.index_head_dim)

    def index_source(self, layer: int) -> int:
        """Return the layer whose indexer chooses for ``layer``."""
        return max(i for i in range(layer + 1) if self.indexer_types[i] == "full")

    def to_hf_config(self, dtype: str = "float32") -> dict[str, Any]:
        return {**super().to_hf_config(dtype), "indexer_types": list(self.indexer_types)}

    @classmethod
    def check_config(cls, config: Mapping[str, Any]) -> None:
        super().check_config({"first_k_dense_replace": cls.first_k_dense_replace, **config})
        for key, value in {"rope_interleave": True, "indexer_rope_interleave": True, "mlp_bias": False}.items():
            if config.get(key, value) != value:
                raise ValueError(f"{key} is {config[key]!r}; this model computes {value!r}")

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> GlmMoeDsaArch:
        if config.get("num_hidden_layers"):
            config = {**config, "indexer_types": indexer_types(config)}
        return super().from_hf_config(config)
