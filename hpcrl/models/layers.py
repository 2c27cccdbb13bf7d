"""Kinds of layers and what each costs: weights, cache and state of a sequence, floating-point operations.

A multiply-add counts as two operations. ``context`` is the number of tokens that one query token sees, itself
included. Sources of formulas: docs/planning.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcrl.models.tensors import DTYPE_BYTES, FP8_BLOCK, Part, Weight

__all__ = ["DenseMlp", "Gqa", "Indexer", "Layer", "Mamba2", "Mixer", "Mla", "Mlp", "Moe"]

KV_DTYPES = ("float32", "bfloat16", "float16", "fp8")


def _kv_element_bytes(dtype: str) -> int:
    if dtype not in KV_DTYPES:
        raise ValueError(f"KV cache dtype is {dtype!r}; it must be one of {', '.join(KV_DTYPES)}")
    return 1 if dtype == "fp8" else DTYPE_BYTES[dtype]


def _linear(name: str, out: int, inp: int, part: Part, *, tp: int | None, bias: bool = False) -> tuple[Weight, ...]:
    """A linear layer ``[out, in]``, its bias cut as its rows are."""
    weight = Weight(f"{name}.weight", (out, inp), part, tp_dim=tp, quantized=True)
    if not bias:
        return (weight,)
    return weight, Weight(f"{name}.bias", (out,), part, tp_dim=0 if tp == 0 else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gqa:
    """Attention with grouped queries (one group a head: multi-head attention)."""

    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    qk_norm: bool = False
    bias: bool = False
    """Of q, k and v."""
    output_bias: bool = False

    @property
    def weights(self) -> tuple[Weight, ...]:
        d, q, kv = self.hidden_size, self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        part = Part.ATTENTION
        norms = ("q_norm", "k_norm") if self.qk_norm else ()
        return (
            *_linear("q_proj", q, d, part, tp=0, bias=self.bias),
            *_linear("k_proj", kv, d, part, tp=0, bias=self.bias),
            *_linear("v_proj", kv, d, part, tp=0, bias=self.bias),
            *_linear("o_proj", d, q, part, tp=1, bias=self.output_bias),
            *(Weight(f"{name}.weight", (self.head_dim,), part) for name in norms),
        )

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Keys and values: ``2 · kv_heads · head_dim · bytes``."""
        return 2 * self.num_key_value_heads * self.head_dim * _kv_element_bytes(dtype)

    def state_bytes_per_sequence(self, dtype: str) -> int:
        """Attention has no state beside its cache."""
        return 0

    @property
    def projection_flops(self) -> int:
        """``2 · weights`` a token."""
        return 2 * sum(w.elements for w in self.weights if len(w.shape) == 2)

    def score_flops(self, context: float, *, absorbed: bool = False) -> float:
        """``4 · heads · head_dim · context``: queries with keys, weights with values."""
        return 4.0 * self.num_attention_heads * self.head_dim * context


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexer:
    """The lightning indexer of DeepSeek Sparse Attention: picks the ``topk`` tokens that a query attends to."""

    hidden_size: int
    q_lora_rank: int
    n_heads: int
    head_dim: int
    topk: int

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Every rank of tensor parallelism has the whole indexer."""
        part = Part.INDEXER
        return (
            *_linear("indexer.wq_b", self.n_heads * self.head_dim, self.q_lora_rank, part, tp=None),
            *_linear("indexer.wk", self.head_dim, self.hidden_size, part, tp=None),
            Weight("indexer.k_norm.weight", (self.head_dim,), part),
            Weight("indexer.k_norm.bias", (self.head_dim,), part),
            Weight("indexer.weights_proj.weight", (self.n_heads, self.hidden_size), part),
        )

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys in FP8 and a float32 scale for each 128 of them, whatever the dtype of the KV cache is."""
        return self.head_dim + 4 * -(-self.head_dim // FP8_BLOCK)

    @property
    def projection_flops(self) -> int:
        """``2 · weights`` a token."""
        return 2 * sum(w.elements for w in self.weights if len(w.shape) == 2)

    def score_flops(self, context: float) -> float:
        """``2 · heads · head_dim · context`` and a weighted sum over heads: the part that grows with the context."""
        return 2.0 * self.n_heads * (self.head_dim + 1) * context


@dataclass(frozen=True, slots=True, kw_only=True)
class Mla:
    """Multi-head latent attention; with ``indexer`` DeepSeek Sparse Attention."""

    hidden_size: int
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    bias: bool = False
    indexer: Indexer | None = None
    shares_indexer: bool = False
    """Takes the choice of the layer below that has an indexer (GLM-5.2)."""
    topk: int | None = None
    """Tokens that a query attends to at most; None: all of them."""

    @property
    def weights(self) -> tuple[Weight, ...]:
        d, heads, part = self.hidden_size, self.num_attention_heads, Part.ATTENTION
        q = heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        return (
            *self._query(d, q),
            *_linear("kv_a_proj_with_mqa", self.kv_lora_rank + self.qk_rope_head_dim, d, part, tp=None, bias=self.bias),
            Weight("kv_a_layernorm.weight", (self.kv_lora_rank,), part),
            *_linear("kv_b_proj", heads * (self.qk_nope_head_dim + self.v_head_dim), self.kv_lora_rank, part, tp=0),
            *_linear("o_proj", d, heads * self.v_head_dim, part, tp=1, bias=self.bias),
            *(() if self.indexer is None else self.indexer.weights),
        )

    def _query(self, d: int, q: int) -> tuple[Weight, ...]:
        if self.q_lora_rank is None:
            return _linear("q_proj", q, d, Part.ATTENTION, tp=0)
        return (
            *_linear("q_a_proj", self.q_lora_rank, d, Part.ATTENTION, tp=None, bias=self.bias),
            Weight("q_a_layernorm.weight", (self.q_lora_rank,), Part.ATTENTION),
            *_linear("q_b_proj", q, self.q_lora_rank, Part.ATTENTION, tp=0),
        )

    def kv_bytes_per_token(self, dtype: str) -> int:
        """The latent and the rotary key, once for all heads, and the indexer's keys.

        Sparse attention in FP8 keeps the rotary part in bfloat16 and a float32 scale for each 128 latents
        (vLLM's ``fp8_ds_mla``: 512 + 16 + 128 = 656 bytes).
        """
        own = (self.kv_lora_rank + self.qk_rope_head_dim) * _kv_element_bytes(dtype)
        if dtype == "fp8" and self.topk is not None:
            own = self.kv_lora_rank + 4 * -(-self.kv_lora_rank // FP8_BLOCK) + 2 * self.qk_rope_head_dim
        return own + (0 if self.indexer is None else self.indexer.kv_bytes_per_token)

    def state_bytes_per_sequence(self, dtype: str) -> int:
        """Attention has no state beside its cache."""
        return 0

    @property
    def projection_flops(self) -> int:
        """``2 · weights`` a token, the indexer's not included; absorbed and expanded form cost the same."""
        return 2 * sum(w.elements for w in self.weights if len(w.shape) == 2 and w.part is Part.ATTENTION)

    def score_flops(self, context: float, *, absorbed: bool = False) -> float:
        """Queries with keys and weights with values, over at most ``topk`` tokens.

        Expanded (training, prefill): ``2 · heads · (nope + rope + v)`` a key. Absorbed (decode, and sparse kernels):
        ``2 · heads · (2 · kv_lora + rope)`` a key.
        """
        seen = context if self.topk is None else min(context, float(self.topk))
        per_key = self.qk_nope_head_dim + self.qk_rope_head_dim + self.v_head_dim
        if absorbed:
            per_key = 2 * self.kv_lora_rank + self.qk_rope_head_dim
        return 2.0 * self.num_attention_heads * per_key * seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2:
    """A Mamba-2 mixer: a state of fixed size in place of a cache that grows."""

    hidden_size: int
    num_heads: int
    head_dim: int
    n_groups: int
    state_size: int
    conv_kernel: int
    chunk_size: int
    conv_bias: bool = True
    proj_bias: bool = False

    @property
    def inner_size(self) -> int:
        """Width inside the mixer."""
        return self.num_heads * self.head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the short convolution: the input and two state projections a group."""
        return self.inner_size + 2 * self.n_groups * self.state_size

    @property
    def weights(self) -> tuple[Weight, ...]:
        part, inner = Part.MAMBA, self.inner_size
        conv_bias = (Weight("conv1d.bias", (self.conv_dim,), part, tp_dim=0),) if self.conv_bias else ()
        return (
            Weight("dt_bias", (self.num_heads,), part, tp_dim=0),
            Weight("A_log", (self.num_heads,), part, tp_dim=0),
            Weight("D", (self.num_heads,), part, tp_dim=0),
            Weight("conv1d.weight", (self.conv_dim, 1, self.conv_kernel), part, tp_dim=0),
            *conv_bias,
            *_linear(
                "in_proj", inner + self.conv_dim + self.num_heads, self.hidden_size, part, tp=0, bias=self.proj_bias
            ),
            Weight("norm.weight", (inner,), part, tp_dim=0),
            *_linear("out_proj", self.hidden_size, inner, part, tp=1, bias=self.proj_bias),
        )

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Nothing grows with the sequence."""
        _kv_element_bytes(dtype)
        return 0

    def state_bytes_per_sequence(self, dtype: str) -> int:
        """The last ``conv_kernel - 1`` inputs of the convolution in ``dtype``, and the state in float32."""
        conv = self.conv_dim * (self.conv_kernel - 1) * max(2, _kv_element_bytes(dtype))
        return conv + self.num_heads * self.head_dim * self.state_size * 4

    @property
    def projection_flops(self) -> int:
        """``2 · weights`` of both projections and the convolution a token."""
        matrices = sum(w.elements for w in self.weights if len(w.shape) == 2)
        return 2 * (matrices + self.conv_dim * self.conv_kernel)

    def score_flops(self, context: float, *, absorbed: bool = False) -> float:
        """The chunked scan: within a chunk as attention does, and into and out of the state.

        ``absorbed`` (decode) is the recurrence alone: ``6 · heads · head_dim · state``.
        """
        state = 6.0 * self.num_heads * self.head_dim * self.state_size
        if absorbed:
            return state
        inside = min(context, self.chunk_size) * (self.n_groups * self.state_size + self.num_heads * self.head_dim)
        return state + 2.0 * inside


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseMlp:
    """A feed-forward block for every token; ``gated``: SwiGLU's three matrices, else two."""

    hidden_size: int
    intermediate_size: int
    gated: bool = True
    part: Part = Part.DENSE_MLP
    prefix: str = ""
    bias: bool = False

    @property
    def weights(self) -> tuple[Weight, ...]:
        d, f = self.hidden_size, self.intermediate_size
        names = ("gate_proj", "up_proj") if self.gated else ("up_proj",)
        return (
            *(w for name in names for w in _linear(self.prefix + name, f, d, self.part, tp=0, bias=self.bias)),
            *_linear(f"{self.prefix}down_proj", d, f, self.part, tp=1, bias=self.bias),
        )

    @property
    def flops(self) -> int:
        """``2 · weights`` a token."""
        return 2 * sum(w.elements for w in self.weights if len(w.shape) == 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moe:
    """Routed experts, and shared ones that every token visits."""

    hidden_size: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_intermediate_size: int = 0
    """Width of all shared experts together; 0: none."""
    shared_prefix: str = "shared_experts."
    gated: bool = True
    correction_bias: bool = False
    """The router has a bias that only chooses (``e_score_correction_bias``, float32)."""
    latent_size: int | None = None
    """Experts work in a space of this width (Nemotron 3 Super); None: ``hidden_size``."""

    @property
    def expert_width(self) -> int:
        """Width of what an expert takes and gives."""
        return self.hidden_size if self.latent_size is None else self.latent_size

    @property
    def expert_weights(self) -> tuple[Weight, ...]:
        """Weights of the routed experts; names have ``{}`` for the expert."""
        d, f, n = self.expert_width, self.moe_intermediate_size, self.num_experts
        names = ("gate_proj", "up_proj") if self.gated else ("up_proj",)
        part = Part.EXPERT
        return (
            *(Weight(f"experts.{{}}.{x}.weight", (f, d), part, tp_dim=0, quantized=True, copies=n) for x in names),
            Weight("experts.{}.down_proj.weight", (d, f), part, tp_dim=1, quantized=True, copies=n),
        )

    @property
    def expert_parameters(self) -> int:
        """Parameters of one routed expert."""
        return sum(w.elements for w in self.expert_weights) // self.num_experts

    @property
    def shared(self) -> DenseMlp | None:
        """The shared experts as one block."""
        if not self.shared_intermediate_size:
            return None
        return DenseMlp(
            hidden_size=self.hidden_size,
            intermediate_size=self.shared_intermediate_size,
            gated=self.gated,
            part=Part.SHARED_EXPERT,
            prefix=self.shared_prefix,
        )

    @property
    def weights(self) -> tuple[Weight, ...]:
        d, part = self.hidden_size, Part.ROUTER
        bias = Weight("gate.e_score_correction_bias", (self.num_experts,), part, dtype="float32", trained=False)
        latent: tuple[Weight, ...] = ()
        if self.latent_size is not None:
            latent = (
                *_linear("fc1_latent_proj", self.latent_size, d, Part.SHARED_EXPERT, tp=None),
                *_linear("fc2_latent_proj", d, self.latent_size, Part.SHARED_EXPERT, tp=None),
            )
        return (
            Weight("gate.weight", (self.num_experts, d), part),
            *((bias,) if self.correction_bias else ()),
            *self.expert_weights,
            *(() if self.shared is None else self.shared.weights),
            *latent,
        )

    @property
    def router_flops(self) -> int:
        """``2 · hidden · experts`` a token."""
        return 2 * self.hidden_size * self.num_experts

    @property
    def expert_flops(self) -> int:
        """``2 · weights`` of the chosen experts a token."""
        return 2 * self.num_experts_per_tok * self.expert_parameters

    @property
    def shared_flops(self) -> int:
        """``2 · weights`` of the shared experts (and of the projections to and from the latent space) a token."""
        own = 0 if self.shared is None else self.shared.flops
        return own + (0 if self.latent_size is None else 4 * self.hidden_size * self.latent_size)


Mixer = Gqa | Mla | Mamba2
Mlp = DenseMlp | Moe


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A decoder layer: a mixer, a feed-forward block, or (hybrids) only one of the two."""

    mixer: Mixer | None
    mlp: Mlp | None
    mixer_prefix: str = "self_attn."
    mlp_prefix: str = "mlp."
    extra: tuple[Weight, ...] = ()
    """Norms, and what a multi-token-prediction module has around its layer."""

    @property
    def weights(self) -> tuple[Weight, ...]:
        """All weights by their names in the layer."""
        parts = ((self.mixer_prefix, self.mixer), (self.mlp_prefix, self.mlp))
        own = (
            Weight(prefix + w.name, w.shape, w.part, w.tp_dim, w.dtype, w.quantized, w.copies, w.trained)
            for prefix, module in parts
            if module is not None
            for w in module.weights
        )
        return (*self.extra, *own)
