"""Attention over a cache of tokens: grouped queries, latents, and the indexer of sparse attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hpcrl.models.layers.common import kv_element_bytes, linear
from hpcrl.models.tensors import FP8_BLOCK, Part, Weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Gqa:
    """Attention with grouped queries (one group a head: multi-head attention)."""

    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    qk_norm: Literal["none", "head", "all"] = "none"
    """Norms of queries and keys: a weight for each channel of a head, or for all channels of all heads."""
    bias: bool = False
    """Whether q, k and v have a bias."""
    output_bias: bool = False
    output_gate: bool = False
    """Queries are projected together with a gate of the output (Qwen3-Next)."""
    sinks: bool = False
    """A learned logit a head that takes part in the softmax and has no value (gpt-oss)."""
    rotary: bool = True
    """Queries and keys are rotated by their positions."""
    window: int | None = None
    """Maximum number of tokens that a query attends to, itself included; None: all before it."""
    chunk: int | None = None
    """Size of a chunk in tokens: a query attends within its own chunk, up to itself (Llama 4); None: to all before
    it."""

    @property
    def weights(self) -> tuple[Weight, ...]:
        d, q, kv = self.hidden_size, self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        part = Part.ATTENTION
        return (
            *linear("q_proj", 2 * q if self.output_gate else q, d, part, tp=0, bias=self.bias),
            *linear("k_proj", kv, d, part, tp=0, bias=self.bias),
            *linear("v_proj", kv, d, part, tp=0, bias=self.bias),
            *linear("o_proj", d, q, part, tp=1, bias=self.output_bias),
            *self._norms(q, kv),
            *((Weight("sinks", (self.num_attention_heads,), part, tp_dim=0),) if self.sinks else ()),
        )

    def _norms(self, q: int, kv: int) -> tuple[Weight, ...]:
        if self.qk_norm == "none":
            return ()
        whole = self.qk_norm == "all"
        widths = {"q_norm": q, "k_norm": kv} if whole else dict.fromkeys(("q_norm", "k_norm"), self.head_dim)
        return tuple(
            Weight(f"{name}.weight", (width,), Part.ATTENTION, tp_dim=0 if whole else None)
            for name, width in widths.items()
        )

    @property
    def limit(self) -> int | None:
        """Return the maximum tokens that a query sees, which is also the maximum that is kept; None: no maximum."""
        limits = [limit for limit in (self.window, self.chunk) if limit is not None]
        return min(limits, default=None)

    def seen(self, context: float) -> float:
        """Return the tokens that a query sees; in a later chunk the mean over its places, smooth in the context."""
        if self.limit is None or context <= self.limit:
            return context
        return float(self.limit) if self.chunk is None else (self.limit + 1) / 2

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Return the bytes of keys and values: ``2 · kv_heads · head_dim · bytes``."""
        return 2 * self.num_key_value_heads * self.head_dim * kv_element_bytes(dtype)

    def kept_tokens(self, length: int) -> int:
        """Return the tokens of a sequence of ``length`` whose keys and values must be kept."""
        return length if self.limit is None else min(length, self.limit)

    def state_bytes_per_sequence(self, dtype: str) -> int:
        """Return 0: attention has no state other than its cache."""
        return 0

    @property
    def projection_flops(self) -> int:
        """Return the FLOPs of projections: ``2 · weights`` a token."""
        return 2 * sum(w.elements for w in self.weights if len(w.shape) == 2)

    def score_flops(self, context: float, *, absorbed: bool = False) -> float:
        """Return the FLOPs of queries with keys, and weights with values: ``4 · heads · head_dim · seen``."""
        return 4.0 * self.num_attention_heads * self.head_dim * self.seen(context)


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
        """Return the weights; every rank of tensor parallelism has the whole indexer."""
        part = Part.INDEXER
        return (
            *linear("indexer.wq_b", self.n_heads * self.head_dim, self.q_lora_rank, part, tp=None),
            Weight("indexer.wk.weight", (self.head_dim, self.hidden_size), part),
            Weight("indexer.k_norm.weight", (self.head_dim,), part),
            Weight("indexer.k_norm.bias", (self.head_dim,), part),
            Weight("indexer.weights_proj.weight", (self.n_heads, self.hidden_size), part),
        )

    @property
    def kv_bytes_per_token(self) -> int:
        """Return the bytes of FP8 keys and a float32 scale for each 128 of them, for every dtype of the KV cache."""
        return self.head_dim + 4 * -(-self.head_dim // FP8_BLOCK)

    @property
    def projection_flops(self) -> int:
        """Return the FLOPs of projections: ``2 · weights`` a token."""
        return 2 * sum(w.elements for w in self.weights if len(w.shape) == 2)

    def score_flops(self, context: float) -> float:
        """Return the FLOPs that grow with the context: ``2 · heads · head_dim · context``, and a sum over heads."""
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
    topk: int | None = None
    """Tokens that a query attends to at most; None: all of them. Without an indexer it takes the choice of the layer
    below that has one (GLM-5.2)."""

    @property
    def weights(self) -> tuple[Weight, ...]:
        d, heads, part = self.hidden_size, self.num_attention_heads, Part.ATTENTION
        q = heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        return (
            *self._query(d, q),
            *linear("kv_a_proj_with_mqa", self.kv_lora_rank + self.qk_rope_head_dim, d, part, tp=None, bias=self.bias),
            Weight("kv_a_layernorm.weight", (self.kv_lora_rank,), part),
            *linear("kv_b_proj", heads * (self.qk_nope_head_dim + self.v_head_dim), self.kv_lora_rank, part, tp=0),
            *linear("o_proj", d, heads * self.v_head_dim, part, tp=1, bias=self.bias),
            *(() if self.indexer is None else self.indexer.weights),
        )

    def _query(self, d: int, q: int) -> tuple[Weight, ...]:
        if self.q_lora_rank is None:
            return linear("q_proj", q, d, Part.ATTENTION, tp=0)
        return (
            *linear("q_a_proj", self.q_lora_rank, d, Part.ATTENTION, tp=None, bias=self.bias),
            Weight("q_a_layernorm.weight", (self.q_lora_rank,), Part.ATTENTION),
            *linear("q_b_proj", q, self.q_lora_rank, Part.ATTENTION, tp=0),
        )

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Return the bytes of the latent and the rotary key, once for all heads, and of the indexer's keys.

        Sparse attention in FP8 keeps the rotary part in bfloat16 and a float32 scale for each 128 latents
        (vLLM's ``fp8_ds_mla``: 512 + 16 + 128 = 656 bytes).
        """
        own = (self.kv_lora_rank + self.qk_rope_head_dim) * kv_element_bytes(dtype)
        if dtype == "fp8" and self.topk is not None:
            own = self.kv_lora_rank + 4 * -(-self.kv_lora_rank // FP8_BLOCK) + 2 * self.qk_rope_head_dim
        return own + (0 if self.indexer is None else self.indexer.kv_bytes_per_token)

    @property
    def limit(self) -> int | None:
        """Return the maximum tokens that a query attends to.

        The cache keeps all, because the choice changes with the query.
        """
        return self.topk

    def kept_tokens(self, length: int) -> int:
        """Return ``length``: all tokens are kept."""
        return length

    def state_bytes_per_sequence(self, dtype: str) -> int:
        """Return 0: attention has no state other than its cache."""
        return 0

    @property
    def projection_flops(self) -> int:
        """Return the FLOPs ``2 · weights`` a token, without the indexer's; absorbed and expanded form cost the same."""
        return 2 * sum(w.elements for w in self.weights if len(w.shape) == 2 and w.part is Part.ATTENTION)

    def score_flops(self, context: float, *, absorbed: bool = False) -> float:
        """Return the FLOPs of queries with keys and weights with values, over at most ``topk`` tokens.

        Expanded (training, prefill): ``2 · heads · (nope + rope + v)`` a key. Absorbed (decode, and sparse kernels):
        ``2 · heads · (2 · kv_lora + rope)`` a key.
        """
        seen = context if self.topk is None else min(context, float(self.topk))
        per_key = self.qk_nope_head_dim + self.qk_rope_head_dim + self.v_head_dim
        if absorbed:
            per_key = 2 * self.kv_lora_rank + self.qk_rope_head_dim
        return 2.0 * self.num_attention_heads * per_key * seen
