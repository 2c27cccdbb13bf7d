"""Common keys of every decoder family in ``config.json``, with their readers and writers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple, Self

from hpcrl.models.arch.rope import RopeScaling, read_rope
from hpcrl.models.facts import ModelFacts
from hpcrl.models.families import facts_from_config
from hpcrl.models.tensors import TensorSpec

_ROPE = ("rope_theta", "rope_scaling", "partial_rotary_factor")
"""Keys that `read_rope` alone reads: as they stand they are not what the fields of the same names hold."""


class KvShape(NamedTuple):
    """Shape of the KV of a token in each layer: ``heads`` keys and as many values, of these sizes."""

    heads: int
    key_dim: int
    value_dim: int


class StateShape(NamedTuple):
    """Shape of the state that recurrent layers keep of a sequence, whatever its length.

    Attributes
    ----------
    layers:
        Layers that have a state.
    conv:
        The last inputs of their short convolution, ``(inputs, channels)``, in the dtype of the model.
    recurrent:
        Their state in float32: of Mamba-2 ``(heads, head_dim, state_size)``, of the delta rule
        ``(heads, key_dim, value_dim)``.
    """

    layers: tuple[int, ...]
    conv: tuple[int, int]
    recurrent: tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class ModelArch:
    """A decoder that trainer and embedded engine can run; field names are those of transformers.

    Families derive from it (`hpcrl.models.arch.load_arch` finds the one of a model).
    """

    MODEL_TYPES: ClassVar[tuple[str, ...]]
    """Values of ``model_type``; the first is written."""
    ARCHITECTURE: ClassVar[str]
    """Name of the class of transformers and vLLM."""
    CONSTANTS: ClassVar[Mapping[str, Any]] = {}
    """Further keys that readers of ``config.json`` need."""
    NULLABLE: ClassVar[tuple[str, ...]] = ()
    """Fields that have a default, and are None where a config says null."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    num_nextn_predict_layers: int = 0
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None
    model_type: str = ""

    def __post_init__(self) -> None:
        if not self.model_type:
            object.__setattr__(self, "model_type", self.MODEL_TYPES[0])

    # -- what differs between families -----------------------------------------------------------------------------

    @property
    def kv(self) -> KvShape:
        """Return the shape of the KV of a token."""
        raise NotImplementedError

    @property
    def rotary_dim(self) -> int:
        """Return the number of a head's channels that are rotated by the token's position."""
        raise NotImplementedError

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """Return the layers that keep something of every token."""
        return tuple(range(self.num_hidden_layers))

    @property
    def state(self) -> StateShape | None:
        """Return the shape of the state of recurrent layers; None where there are none."""
        return None

    @property
    def routed_experts(self) -> int:
        """Return the number of experts of a sparse layer; 0 where the model is dense."""
        return 0

    @property
    def experts_per_token(self) -> int:
        """Return the number of experts that a token visits in a sparse layer; 0 where the model is dense."""
        return 0

    @property
    def zero_centred_norms(self) -> bool:
        """Return whether norms multiply with ``1 + weight``."""
        return False

    @property
    def has_latent_attention(self) -> bool:
        """Return whether keys and values of all heads come from one latent vector a token."""
        return False

    def is_sparse(self, layer: int) -> bool:
        """Return whether ``layer`` has experts."""
        return False

    @classmethod
    def check_config(cls, config: Mapping[str, Any]) -> None:
        """Refuse what the family's model does not compute (ValueError)."""

    # -- what is the same in all -----------------------------------------------------------------------------------

    @cached_property
    def facts(self) -> ModelFacts:
        """Return all other facts of this model."""
        return facts_from_config(self.to_hf_config(), name=self.model_type)

    def tensors(self) -> Iterator[TensorSpec]:
        """Return all tensors of a published checkpoint, by their Hugging Face names."""
        return self.facts.tensors()

    def num_parameters(self) -> int:
        """Return the number of parameters of the published checkpoint (tied embeddings counted once)."""
        return self.facts.num_parameters()

    def to_hf_config(self, dtype: str = "float32") -> dict[str, Any]:
        """Return the ``config.json`` that transformers and vLLM read."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        own["rope_scaling"] = None if self.rope_scaling is None else self.rope_scaling.to_hf()
        if isinstance(self.eos_token_id, tuple):
            own["eos_token_id"] = list(self.eos_token_id)
        return {
            "architectures": [self.ARCHITECTURE],
            "attention_dropout": 0.0,
            "dtype": dtype,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "use_cache": True,
            **self.CONSTANTS,
            **own,
        }

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> Self:
        """Read a ``config.json`` of this family.

        Raises
        ------
        ValueError
            It asks for what the model does not compute, or a size is missing.
        """
        found = {key: value for key, value in config.items() if value is not None}
        if found.get("hidden_act", "silu") != "silu":
            raise ValueError(f"hidden_act is {found['hidden_act']!r}; this model computes 'silu'")
        cls.check_config(found)
        values = {
            field.name: found[field.name] for field in fields(cls) if field.name in found and field.name not in _ROPE
        }
        values |= {key: value for key, value in read_rope(found).items() if key in cls.__dataclass_fields__}
        values = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
        # missing keys have their family's defaults by now
        values |= {key: None for key in cls.NULLABLE if key not in values}
        missing = [f.name for f in fields(cls) if f.name not in values and f.default is f.default_factory]
        if missing:
            raise ValueError(f"config.json lacks {', '.join(missing)}")
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class GroupedQueryArch(ModelArch):
    """Families in which several query heads share the keys and values of one."""

    num_key_value_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )

    @property
    def kv(self) -> KvShape:
        return KvShape(self.num_key_value_heads, self.head_dim, self.head_dim)

    @property
    def qk_norm(self) -> Literal["none", "head", "all"]:
        """Return the norms of queries and keys: none, of each head alone, or over the channels of all heads."""
        return "none"

    @property
    def output_bias(self) -> bool:
        """Return whether ``attention_bias`` applies to the output projection too."""
        return False

    @property
    def output_gate(self) -> bool:
        """Return whether each head's output is multiplied with the sigmoid of a gate projected with its query."""
        return False

    @property
    def sinks(self) -> bool:
        """Return whether each head has a learned score that takes part in its softmax and has no value."""
        return False

    def window(self, layer: int) -> int | None:
        """Return the number of tokens that a query of ``layer`` sees, itself included; None for all before it."""
        return None
