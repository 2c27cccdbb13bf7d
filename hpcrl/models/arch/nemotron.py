"""Nemotron 3 (``nemotron_h``): layers of one module each, Mamba-2, attention, a dense block or experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from hpcrl.models.arch.base import GroupedQueryArch, StateShape
from hpcrl.models.arch.deepseek import SigmoidMoeArch
from hpcrl.models.families.nemotron import block_types


@dataclass(frozen=True, kw_only=True)
class NemotronHArch(SigmoidMoeArch, GroupedQueryArch):
    """Nemotron 3 Nano and Super; attention does not know positions, and blocks have no gate.

    Attributes
    ----------
    layers_block_type:
        ``mamba``, ``attention``, ``mlp`` or ``moe`` for each layer.
    moe_latent_size:
        Width of what experts take and give; None for ``hidden_size``.
    time_step_min:
        Least step of the recurrence, as transformers has it. vLLM (0.25) has none.
    """

    MODEL_TYPES: ClassVar[tuple[str, ...]] = ("nemotron_h",)
    ARCHITECTURE: ClassVar[str] = "NemotronHForCausalLM"
    CONSTANTS: ClassVar[Mapping[str, Any]] = {"mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "mlp_bias": False}

    layers_block_type: tuple[str, ...]
    mamba_num_heads: int
    mamba_head_dim: int
    ssm_state_size: int
    moe_shared_expert_intermediate_size: int
    n_groups: int = 8
    conv_kernel: int = 4
    chunk_size: int = 128
    use_conv_bias: bool = True
    use_bias: bool = False
    moe_latent_size: int | None = None
    time_step_min: float = 0.001
    rms_norm_eps: float = 1e-5
    mtp_layers_block_type: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.layers_block_type) != self.num_hidden_layers:
            raise ValueError(
                f"layers_block_type names {len(self.layers_block_type)} layers, "
                f"num_hidden_layers is {self.num_hidden_layers}"
            )
        if self.mamba_num_heads % self.n_groups:
            raise ValueError(f"n_groups ({self.n_groups}) must divide mamba_num_heads ({self.mamba_num_heads})")

    @property
    def rotary_dim(self) -> int:
        return 0

    @property
    def conv_channels(self) -> int:
        """Return the channels of the short convolution: values, and each group's inputs and outputs of the state."""
        return self.mamba_num_heads * self.mamba_head_dim + 2 * self.n_groups * self.ssm_state_size

    @property
    def kv_layers(self) -> tuple[int, ...]:
        return self._layers("attention")

    @property
    def state(self) -> StateShape:
        conv = (self.conv_kernel - 1, self.conv_channels)
        return StateShape(self._layers("mamba"), conv, (self.mamba_num_heads, self.mamba_head_dim, self.ssm_state_size))

    def is_sparse(self, layer: int) -> bool:
        return self.layers_block_type[layer] == "moe"

    def _layers(self, kind: str) -> tuple[int, ...]:
        return tuple(i for i, own in enumerate(self.layers_block_type) if own == kind)

    def to_hf_config(self, dtype: str = "float32") -> dict[str, Any]:
        config = super().to_hf_config(dtype)
        for key in ("rope_theta", "rope_scaling", "first_k_dense_replace"):
            del config[key]
        kinds = {key: list(config[key]) for key in ("layers_block_type", "mtp_layers_block_type")}
        if not kinds["mtp_layers_block_type"]:
            del kinds["mtp_layers_block_type"], config["mtp_layers_block_type"]
        return {**config, **kinds, "layer_norm_epsilon": self.rms_norm_eps}

    @classmethod
    def check_config(cls, config: Mapping[str, Any]) -> None:
        wanted: dict[str, Any] = {**cls.CONSTANTS, "attention_bias": False, "tie_word_embeddings": False}
        wanted["sliding_window"] = None
        for key, value in wanted.items():
            if config.get(key, value) != value:
                raise ValueError(f"{key} is {config[key]!r}; this model computes {value!r}")

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> NemotronHArch:
        found = dict(config)
        kinds = block_types(config, "layers_block_type", "hybrid_override_pattern")
        found["layers_block_type"], found["num_hidden_layers"] = kinds, len(kinds)
        if found.get("num_nextn_predict_layers"):
            found["mtp_layers_block_type"] = block_types(config, "mtp_layers_block_type", "mtp_hybrid_override_pattern")
        else:
            found.pop("mtp_layers_block_type", None)
        if found.get("layer_norm_epsilon") is not None:
            found["rms_norm_eps"] = found["layer_norm_epsilon"]
        return super().from_hf_config(found)
