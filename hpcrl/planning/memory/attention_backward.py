"""Bytes that the backward pass of attention takes in addition to what the layer kept. Pure arithmetic on shapes.

The gradient of the attention's output is among them, as the kernel reads it. docs/planning-memory.md has the sums.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from hpcrl.models.layers import Gqa, Layer, Mla
from hpcrl.planning.memory.activations import ActivationShape, gathered_latents_bytes
from hpcrl.planning.memory.flash_attention import WIDEST, accumulator_bytes, backward_bytes, head_width

_SCORES_BYTES = 1 << 30
"""Scores of an indexer that exist at a time: whole they are queries times the context in float32, 17 GB at 131,072
tokens over four ranks, so that a trainer cuts the queries into pieces."""
_CHUNK_BYTES = 64 << 20
"""Maximum bytes of a piece of the queries in the trainer's own sparse attention (`hpcrl.modeling.attention.sparse`)."""
_SCRATCH_BYTES = 1 << 30
"""The same of a GPU's kernel (`hpcrl.modeling.sparse_kernels.by_triton`)."""

Kind = Literal["attention", "ring", "gathered latents"]


class AttentionMemory(NamedTuple):
    """Bytes of a backward pass of attention, and the way in which it is computed."""

    kind: Kind
    value: int


def attention_memory(layer: Layer, shape: ActivationShape) -> AttentionMemory | None:
    """Return what the backward pass of a layer's attention takes; None where it has no attention."""
    mixer = layer.mixer
    if not isinstance(mixer, Gqa | Mla):
        return None
    grad_output = shape.element_bytes * shape.tokens * mixer.num_attention_heads * _widths(mixer)[1]
    if shape.ring and (value := ring_bytes(layer, shape)):
        return AttentionMemory("ring", value + grad_output)
    if value := expansion_bytes(layer, shape):
        return AttentionMemory("gathered latents", value + grad_output)
    if isinstance(mixer, Mla) and mixer.topk is not None:
        return AttentionMemory("attention", _sparse_bytes(mixer, mixer.topk, shape))
    if value := flash_bytes(layer, shape):
        return AttentionMemory("attention", value + grad_output)
    key, value_dim = _widths(mixer)
    heads, key_heads = mixer.num_attention_heads, _key_heads(mixer)
    own = shape.element_bytes * shape.tokens * (heads * key + key_heads * (key + value_dim))
    return AttentionMemory("attention", own + grad_output)


def indexer_bytes(layer: Layer, shape: ActivationShape, context: int) -> int:
    """Return the bytes that the indexer of sparse attention holds while it chooses among ``context`` tokens.

    These are the queries of all its heads, the keys of the whole context, a piece of the scores, and the choice itself.
    None of it is kept, because the indexer has no gradient. It chooses before the MLP of its layer is computed.
    """
    indexer = layer.mixer.indexer if isinstance(layer.mixer, Mla) else None
    if indexer is None or not shape.on_gpu:
        # the plain kernel of processors works in pieces of a few MiB
        return 0
    b, t = shape.element_bytes, shape.tokens
    queries, keys = b * t * indexer.n_heads * indexer.head_dim, b * context * indexer.head_dim
    return queries + keys + min(_SCORES_BYTES, 4 * t * context)


def ring_bytes(layer: Layer, shape: ActivationShape) -> int:
    """Return the bytes that the backward pass of ring attention holds (`hpcrl.modeling.attention.ring`).

    These are the local keys and values, the received ones, and the copies that kernels need of the latter; the
    gradients of keys and values that are sent and received, and that of queries, in float32.
    """
    b, t, mixer = shape.element_bytes, shape.tokens, layer.mixer
    if isinstance(mixer, Gqa):
        travelling = 2 * mixer.num_key_value_heads * mixer.head_dim
        queries = mixer.num_attention_heads * mixer.head_dim
    elif isinstance(mixer, Mla) and mixer.topk is None:
        queries = mixer.num_attention_heads * (mixer.qk_nope_head_dim + mixer.qk_rope_head_dim)
        travelling = queries + mixer.num_attention_heads * mixer.v_head_dim
    else:
        return 0
    return t * (travelling * (3 * b + 2 * 4) + 4 * queries) + _flash_accumulators(mixer, shape)


def expansion_bytes(layer: Layer, shape: ActivationShape) -> int:
    """Return the bytes that the backward pass of gathered latents holds (`hpcrl.modeling.attention.latent_gather`).

    For a rank's share of the heads over all tokens, which is as much as for all heads over its own tokens: keys and
    values, their sources, their gradients from the kernel and the buffers of these gradients, and the gradient of the
    sources. Also gradients of all latents, in float32 and as they are sent.
    """
    mixer, b, t = layer.mixer, shape.element_bytes, shape.tokens
    if not isinstance(mixer, Mla) or not gathered_latents_bytes(mixer, shape):
        return 0
    key, value = mixer.qk_nope_head_dim + mixer.qk_rope_head_dim, mixer.v_head_dim
    made = mixer.num_attention_heads * (2 * mixer.qk_nope_head_dim + 3 * key + 4 * value)
    row = mixer.kv_lora_rank + mixer.qk_rope_head_dim
    return t * (b * made + (4 + b) * shape.gathers_from * row) + _flash_accumulators(mixer, shape)


def flash_bytes(layer: Layer, shape: ActivationShape) -> int:
    """Return the bytes that the backward pass of dense attention makes on a GPU (`hpcrl.modeling.kernels.varlen`).

    Attention in a ring and that of gathered latents have functions of their own.
    """
    mixer = layer.mixer
    if not isinstance(mixer, Gqa | Mla) or not _is_flash(mixer, shape) or gathered_latents_bytes(mixer, shape):
        return 0
    return backward_bytes(
        shape.tokens,
        mixer.num_attention_heads,
        _key_heads(mixer),
        _widths(mixer),
        deterministic=shape.deterministic,
        head_ranks=shape.head_ranks,
    )


def _sparse_bytes(mixer: Mla, topk: int, shape: ActivationShape) -> int:
    """Return the bytes of a backward pass over chosen rows: gradients in latents, and what a piece of queries needs."""
    b, t, heads = shape.element_bytes, shape.tokens, mixer.num_attention_heads
    row = mixer.kv_lora_rank + mixer.qk_rope_head_dim
    # of the output, of queries, and of the rows that are added up in float32
    gradients = t * (b * heads * (mixer.kv_lora_rank + row) + (4 + b) * row)
    if shape.on_gpu:
        # weights, their gradients and parts of the gradients of rows
        return gradients + min(_SCRATCH_BYTES, b * t * topk * (2 * heads + row))
    # rows that queries chose and their gradients (in float32 once more), weights and theirs
    pairs = min(_CHUNK_BYTES / (12 * (row + heads)), t * topk)
    return gradients + round(pairs * (row * (4 + 2 * b) + heads * (12 + b)))


def _flash_accumulators(mixer: Gqa | Mla, shape: ActivationShape) -> int:
    if not _is_flash(mixer, shape):
        return 0
    return accumulator_bytes(
        shape.tokens,
        mixer.num_attention_heads,
        _key_heads(mixer),
        head_width(*_widths(mixer)),
        deterministic=shape.deterministic,
        head_ranks=shape.head_ranks,
    )


def _is_flash(mixer: Gqa | Mla, shape: ActivationShape) -> bool:
    """Return whether torch's FlashAttention computes it: in half precision, of all keys, with heads that fit."""
    sparse = isinstance(mixer, Mla) and mixer.topk is not None
    return shape.on_gpu and shape.element_bytes == 2 and not sparse and max(_widths(mixer)) <= WIDEST


def _key_heads(mixer: Gqa | Mla) -> int:
    return mixer.num_key_value_heads if isinstance(mixer, Gqa) else mixer.num_attention_heads


def _widths(mixer: Gqa | Mla) -> tuple[int, int]:
    """Return the channels of a head of keys and of values."""
    if isinstance(mixer, Gqa):
        return mixer.head_dim, mixer.head_dim
    return mixer.qk_nope_head_dim + mixer.qk_rope_head_dim, mixer.v_head_dim
