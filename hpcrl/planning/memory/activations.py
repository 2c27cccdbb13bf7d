"""Bytes that a layer's forward pass keeps for its backward pass, by module. Pure arithmetic on shapes.

The trainer of this project is counted, as it was measured on processors and on a GPU: a norm keeps its input, a gated
block gate, up and their product, all else what autograd keeps. Attention reads packed sequences in place.
docs/planning-memory.md has the sums.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcrl.models.layers import DenseMlp, GatedDeltaNet, Gqa, Layer, Mamba2, Mixer, Mla, Moe
from hpcrl.planning.memory.flash_attention import WIDEST, accumulator_bytes, backward_bytes, head_width

_SCORES_BYTES = 1 << 30
"""Scores of an indexer that exist at a time: whole they are queries times the context in float32, 17 GB at 131,072
tokens over four ranks, so that a trainer cuts the queries into pieces."""
_CHUNK_BYTES = 64 << 20
"""Maximum bytes of a piece of the queries in the trainer's own sparse attention (`hpcrl.modeling.attention.sparse`)."""
_BLOCK = 128
"""Channels of an activation that share a float32 scale in FP8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationShape:
    """Shape of the activations of a layer on one rank.

    Attributes
    ----------
    tokens:
        Tokens of the micro-batch on this rank (after context parallelism).
    element_bytes:
        Bytes of an element of activations.
    on_gpu:
        Whether attention runs on kernels of GPUs, and not on plain torch.
    imbalance:
        Tokens that the busiest rank of expert parallelism receives, relative to the mean.
    gathers_from:
        Ranks whose latents latent attention gathers; 0: it keeps keys and values of heads.
    head_ranks:
        Ranks that share the heads of attention, each with the tokens of all of them.
    deterministic:
        Whether backward passes add in a fixed order.
    """

    tokens: int
    element_bytes: int
    on_gpu: bool = False
    imbalance: float = 1.0
    gathers_from: int = 0
    head_ranks: int = 1
    deterministic: bool = False


def saved_bytes(layer: Layer, shape: ActivationShape) -> int:
    """Return the bytes that are kept of a layer without activation checkpointing."""
    total = 0.0
    hidden = _hidden(layer)
    if layer.mixer is not None:
        total += _norm(hidden, shape) + _mixer(layer.mixer, shape)
    if layer.mlp is not None:
        total += _norm(hidden, shape) + _mlp(layer.mlp, shape)
    return round(total)


def saved_op_output_bytes(layer: Layer, shape: ActivationShape, *, ep: int = 1, cp: int = 1) -> int:
    """Return the bytes that selective checkpointing keeps in addition to a layer's input.

    These are the outputs of attention, experts and exchanges.
    """
    b, t, mlp = shape.element_bytes, shape.tokens, layer.mlp
    total = float(attention_output_bytes(layer, shape))
    if cp > 1 and isinstance(layer.mixer, Gqa):
        # queries, keys and values of all tokens and some heads; and the way back
        heads = layer.mixer.num_attention_heads + layer.mixer.num_key_value_heads
        total += 2 * b * t * heads * layer.mixer.head_dim
    total += _gathered_latents(layer.mixer, shape)
    if isinstance(mlp, Moe):
        routed = t * mlp.num_experts_per_tok
        total += b * routed * shape.imbalance * ((2 if mlp.gated else 1) * mlp.moe_intermediate_size + mlp.expert_width)
        if ep > 1:
            total += b * routed * (1 + shape.imbalance) * mlp.expert_width
    return round(total)


def attention_output_bytes(layer: Layer, shape: ActivationShape) -> int:
    """Return the bytes of the attention's output, with the other tensors that its backward pass needs."""
    mixer = layer.mixer
    if mixer is None:
        return 0
    if isinstance(mixer, Gqa | Mla):
        heads = mixer.num_attention_heads
        if isinstance(mixer, Mla) and mixer.topk is not None:
            # in latents, normalisers in float32, and the choice
            return shape.tokens * (heads * (mixer.kv_lora_rank * shape.element_bytes + 4) + 4 * mixer.topk)
        if _gathered_latents(mixer, shape):
            assert isinstance(mixer, Mla)
            return shape.tokens * heads * (mixer.v_head_dim * shape.element_bytes + 4)
        wide = mixer.head_dim if isinstance(mixer, Gqa) else mixer.qk_nope_head_dim + mixer.qk_rope_head_dim
        return shape.tokens * heads * (wide * shape.element_bytes + 4)
    return shape.tokens * mixer.inner_size * shape.element_bytes


def gradient_bytes(layer: Layer, shape: ActivationShape) -> int:
    """Return the bytes of the largest coexisting gradients of activations: around the experts, and the residual's."""
    b, t, d = shape.element_bytes, shape.tokens, _hidden(layer)
    mlp = layer.mlp
    # of a gated block those of gate and up take the memory of these
    widths = 1 if mlp is not None and mlp.gated and not _clamped(mlp) else 3
    if isinstance(mlp, Moe):
        routed = t * mlp.num_experts_per_tok * shape.imbalance
        return round(b * (routed * (widths * mlp.moe_intermediate_size + mlp.expert_width) + 2 * t * d))
    width = mlp.intermediate_size if mlp is not None else 2 * d
    return round(b * t * (widths * width + 2 * d))


def fp8_copies_bytes(layer: Layer, shape: ActivationShape) -> int:
    """Return the bytes of FP8 copies of the matrix product that needs most.

    The product copies its input and the gradient of its output in FP8, each once with the scales of its rows (for the
    product itself) and once with those of its columns (for the gradient of the weights).
    """
    mlp = layer.mlp
    each = 1 + 4 / _BLOCK
    if isinstance(mlp, Moe):
        rows = shape.tokens * mlp.num_experts_per_tok * shape.imbalance
        widest = mlp.expert_width + (2 if mlp.gated else 1) * mlp.moe_intermediate_size
        return round(2 * each * rows * widest)
    hidden = _hidden(layer)
    widest = hidden + (0 if mlp is None else (2 if mlp.gated else 1) * mlp.intermediate_size)
    return round(2 * each * shape.tokens * widest)


def indexer_bytes(layer: Layer, shape: ActivationShape, context: int) -> int:
    """Return the bytes that the indexer of sparse attention holds while it chooses.

    These are the queries of all its heads, the keys of the whole ``context``, a piece of the scores, and the choice
    itself. None of it is kept, because the indexer has no gradient.
    """
    indexer = layer.mixer.indexer if isinstance(layer.mixer, Mla) else None
    if indexer is None:
        return 0
    b, t = shape.element_bytes, shape.tokens
    if not shape.on_gpu and isinstance(layer.mixer, Mla) and layer.mixer.topk is not None:
        # rows that queries chose and their gradients (in float32 once more), weights and theirs, a piece of the queries
        # at a time
        heads, row = layer.mixer.num_attention_heads, layer.mixer.kv_lora_rank + layer.mixer.qk_rope_head_dim
        pairs = min(_CHUNK_BYTES / (12 * (row + heads)), t * layer.mixer.topk)
        return _beyond_mlp(round(pairs * (row * (4 + 2 * b) + heads * (12 + b))), layer, shape)
    queries, keys = b * t * indexer.n_heads * indexer.head_dim, b * context * indexer.head_dim
    return queries + keys + min(_SCORES_BYTES, 4 * t * context)


def ring_bytes(layer: Layer, shape: ActivationShape) -> int:
    """Return the bytes that the backward pass of ring attention holds (`hpcrl.modeling.attention.ring`).

    These are the local keys and values, the received ones, and the copies that kernels need of the latter; the
    gradients of keys and values that are sent and received, and that of queries, in float32. The memory of the layer's
    experts is free by then.
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
    held = t * (travelling * (3 * b + 2 * 4) + 4 * queries)
    return _beyond_mlp(held + _flash_accumulators(mixer, shape), layer, shape)


def expansion_bytes(layer: Layer, shape: ActivationShape) -> int:
    """Return the bytes that the backward pass of gathered latents holds (`hpcrl.modeling.attention.latent_gather`).

    For a rank's share of the heads over all tokens, which is as much as for all heads over its own tokens: keys and
    values, their sources, their gradients from the kernel and the buffers of these gradients, and the gradient of the
    sources. Also gradients of all latents, in float32 and as they are sent. The memory of the layer's experts is free
    by then.
    """
    mixer, b, t = layer.mixer, shape.element_bytes, shape.tokens
    if not isinstance(mixer, Mla) or not _gathered_latents(mixer, shape):
        return 0
    key, value = mixer.qk_nope_head_dim + mixer.qk_rope_head_dim, mixer.v_head_dim
    made = mixer.num_attention_heads * (2 * mixer.qk_nope_head_dim + 3 * key + 4 * value)
    row = mixer.kv_lora_rank + mixer.qk_rope_head_dim
    held = t * (b * made + (4 + b) * shape.gathers_from * row)
    return _beyond_mlp(held + _flash_accumulators(mixer, shape), layer, shape)


def flash_bytes(layer: Layer, shape: ActivationShape) -> int:
    """Return the bytes that the backward pass of dense attention holds on a GPU (`hpcrl.modeling.kernels.varlen`).

    Attention in a ring and that of gathered latents have terms of their own. The memory of the layer's experts is free
    by then.
    """
    mixer = layer.mixer
    if not isinstance(mixer, Gqa | Mla) or not _is_flash(mixer, shape) or _gathered_latents(mixer, shape):
        return 0
    value = backward_bytes(
        shape.tokens,
        mixer.num_attention_heads,
        _key_heads(mixer),
        _widths(mixer),
        deterministic=shape.deterministic,
        head_ranks=shape.head_ranks,
    )
    return _beyond_mlp(value, layer, shape)


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


def _beyond_mlp(value: int, layer: Layer, shape: ActivationShape) -> int:
    """Return the bytes of attention's backward pass beyond the memory that the layer's MLP held before.

    The MLP is the experts, or a dense block.
    """
    before = gradient_bytes(layer, shape) + (0 if layer.mlp is None else _mlp(layer.mlp, shape))
    return max(0, round(value - before))


def _gathered_latents(mixer: Mixer | None, shape: ActivationShape) -> int:
    """Return the bytes of gathered latents and rotary keys of all tokens of a context-parallel group.

    0 where none are gathered to be expanded.
    """
    if not isinstance(mixer, Mla) or mixer.topk is not None:
        return 0
    row = mixer.kv_lora_rank + mixer.qk_rope_head_dim
    return shape.element_bytes * shape.tokens * shape.gathers_from * row


def _hidden(layer: Layer) -> int:
    module = layer.mixer if layer.mixer is not None else layer.mlp
    assert module is not None
    return module.hidden_size


def _norm(width: int, shape: ActivationShape) -> float:
    """Return the bytes of a norm's input and output."""
    return 2 * shape.element_bytes * shape.tokens * width


def _mixer(mixer: Mixer, shape: ActivationShape) -> float:
    match mixer:
        case Gqa():
            return _gqa(mixer, shape)
        case Mla():
            return _mla(mixer, shape)
        case Mamba2():
            return _mamba(mixer, shape)
        case GatedDeltaNet():
            return _delta_net(mixer, shape)


def _gqa(mixer: Gqa, shape: ActivationShape) -> float:
    b, t = shape.element_bytes, shape.tokens
    q, kv = mixer.num_attention_heads * mixer.head_dim, mixer.num_key_value_heads * mixer.head_dim
    # the gate of the output, as it is projected with the queries and as it is applied, and the output before it
    gate = 3 * q * b * t if mixer.output_gate else 0
    # what a norm of each head reads, and what is rotated
    queries_and_keys = (q + kv) * b * t * (2 if mixer.qk_norm != "none" else 1)
    # the output is what its projection reads
    output = q * b * t + 4 * t * mixer.num_attention_heads
    return queries_and_keys + kv * b * t + output + gate


def _mla(mixer: Mla, shape: ActivationShape) -> float:
    b, t, heads = shape.element_bytes, shape.tokens, mixer.num_attention_heads
    qk = mixer.qk_nope_head_dim + mixer.qk_rope_head_dim
    latents = (mixer.q_lora_rank or 0) + mixer.kv_lora_rank
    if latents_of_all := _gathered_latents(mixer, shape):
        # queries and the output, with a sum of each query's scores; keys and values are made again
        attention = heads * (b * (qk + mixer.v_head_dim) + 4)
        return t * (2 * b * latents + b * mixer.qk_rope_head_dim + attention) + latents_of_all
    if mixer.topk is None:
        # queries; keys, and what they and values are made of; the output, and a sum of each query's scores
        attention = heads * (b * (2 * qk + mixer.qk_nope_head_dim + 2 * mixer.v_head_dim) + 4)
        return t * (2 * b * latents + b * mixer.qk_rope_head_dim + attention)
    low_rank = t * b * (2 * latents + mixer.qk_rope_head_dim)
    queries = t * heads * qk * b
    statistics = 4 * t * heads
    output = t * heads * mixer.v_head_dim * b
    # sparse kernels work on latents: queries folded into them, outputs in them, and the chosen tokens
    folded = t * heads * (mixer.kv_lora_rank + mixer.qk_rope_head_dim) * b
    latent_output = t * heads * mixer.kv_lora_rank * b
    return low_rank + queries + folded + latent_output + output + statistics + 4 * t * mixer.topk


def _mamba(mixer: Mamba2, shape: ActivationShape) -> float:
    b, t, inner = shape.element_bytes, shape.tokens, mixer.inner_size
    # the projection, of which the gate is copied to float32; what is convolved, before and after its activation, and
    # cut into chunks; steps at three places; states before chunks, as the recurrence and as readers have them
    gate = b * (inner + mixer.conv_dim + mixer.num_heads) + (4 * inner if b < 4 else 0)
    steps = 4 * 3 * mixer.num_heads
    edges = 2 * 4 * mixer.num_heads * (mixer.head_dim * mixer.state_size + 1) / mixer.chunk_size
    # read, activated gate, their product and its normalised value in float32; output; indices of tokens
    normed = inner * (4 * 4 + b) + 4 * mixer.n_groups
    return t * (gate + 4 * b * mixer.conv_dim + steps + edges + normed + 4 * 8)


def _delta_net(mixer: GatedDeltaNet, shape: ActivationShape) -> float:
    b, t, inner, heads = shape.element_bytes, shape.tokens, mixer.inner_size, mixer.num_value_heads
    # what is convolved, by itself and with the inputs before it; before its activation, and cut into chunks
    convolved = 4 * b * mixer.conv_dim
    # decay at three places, strength at two
    numbers = heads * (4 * 3 + 4 + b)
    # of each head in float32: where corrections go and what they are less by, and corrections at two places
    rule = 4 * heads * (2 * mixer.key_head_dim + 2 * mixer.value_head_dim)
    # states before chunks, as the recurrence and as readers have them
    edges = 2 * 4 * heads * (mixer.key_head_dim * mixer.value_head_dim + 1) / mixer.chunk_size
    # read, activated gate and gate in float32; normalised, with its weight, with its gate; indices of tokens
    normed = inner * (3 * 4 + 3 * b) + 4 * heads
    return t * (convolved + numbers + rule + edges + normed + 4 * 8)


def _mlp(mlp: DenseMlp | Moe, shape: ActivationShape) -> float:
    if isinstance(mlp, DenseMlp):
        return _dense(mlp, shape.tokens, shape)
    b, t, k = shape.element_bytes, shape.tokens, mlp.num_experts_per_tok
    routed = t * k * shape.imbalance
    # probabilities; chosen experts, their weights before and after they are normalised; places of rows, and rows by
    # place, twice where the rows of each token begin
    router = 4 * t * mlp.num_experts + t * (4 + 8 + 32 * k)
    if mlp.correction_bias and b < 4:
        # scores are computed of float32 copies; what they are copied from is kept for others that read it alone
        router += 4 * mlp.hidden_size * (t + mlp.num_experts)
        router -= b * t * mlp.hidden_size if mlp.shared is None and mlp.latent_size is None else 0
    # sorted inputs, gate and up, activation, product, outputs
    # clamped gates (gpt-oss): they and ups as they are, clamped, activated, and each factor of the product
    products = 7 if _clamped(mlp) else _products(gated=mlp.gated)
    widths = 2 * mlp.expert_width + products * mlp.moe_intermediate_size
    shared = 0.0 if mlp.shared is None else _dense(mlp.shared, t, shape)
    # its output, and the number that it is multiplied with
    shared += b * t * (mlp.hidden_size + 1) if mlp.shared_gate else 0
    # what is sorted by expert is not kept as it was before
    latent = b * t * (mlp.latent_size or 0)
    return router + b * routed * widths + shared + latent


def _dense(mlp: DenseMlp, tokens: float, shape: ActivationShape) -> float:
    return shape.element_bytes * tokens * _products(gated=mlp.gated) * mlp.intermediate_size


def _clamped(mlp: DenseMlp | Moe) -> bool:
    """Return whether it has gpt-oss's experts, whose gates are not SwiGLU."""
    return isinstance(mlp, Moe) and mlp.bias


def _products(*, gated: bool) -> int:
    """Return the number of products: gate, up and product; without a gate the squared values and their squares."""
    return 3 if gated else 2
