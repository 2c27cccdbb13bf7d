"""Bytes that a layer's forward pass keeps for its backward pass, by module. Pure arithmetic on shapes.

The trainer of this project is counted, as it was measured on processors and on a GPU: a norm keeps its input, a gated
block gate, up and their product, all else what autograd keeps. Attention reads packed sequences in place.
docs/planning-memory.md has the sums.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcrl.models.layers import DenseMlp, GatedDeltaNet, Gqa, Layer, Mamba2, Mixer, Mla, Moe


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
    ring:
        Whether keys and values travel around the context-parallel ranks.
    deterministic:
        Whether backward passes add in a fixed order.
    """

    tokens: int
    element_bytes: int
    on_gpu: bool = False
    imbalance: float = 1.0
    gathers_from: int = 0
    head_ranks: int = 1
    ring: bool = False
    deterministic: bool = False

    @property
    def exchanges_heads(self) -> bool:
        """Return whether ranks exchange tokens for heads before attention, and back behind it."""
        return self.head_ranks > 1 and not self.gathers_from


def saved_bytes(layer: Layer, shape: ActivationShape) -> int:
    """Return the bytes that are kept of a layer without activation checkpointing."""
    total = 0.0
    hidden = hidden_size_of(layer)
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
    total += gathered_latents_bytes(layer.mixer, shape)
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
        if gathered_latents_bytes(mixer, shape):
            assert isinstance(mixer, Mla)
            return shape.tokens * heads * (mixer.v_head_dim * shape.element_bytes + 4)
        wide = mixer.head_dim if isinstance(mixer, Gqa) else mixer.qk_nope_head_dim + mixer.qk_rope_head_dim
        return shape.tokens * heads * (wide * shape.element_bytes + 4)
    return shape.tokens * mixer.inner_size * shape.element_bytes


def gathered_latents_bytes(mixer: Mixer | None, shape: ActivationShape) -> int:
    """Return the bytes of gathered latents and rotary keys of all tokens of a context-parallel group.

    0 where none are gathered to be expanded.
    """
    if not isinstance(mixer, Mla) or mixer.topk is not None:
        return 0
    row = mixer.kv_lora_rank + mixer.qk_rope_head_dim
    return shape.element_bytes * shape.tokens * shape.gathers_from * row


def hidden_size_of(layer: Layer) -> int:
    """Return the width of the residual stream."""
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
    # the output is what its projection reads; where heads are exchanged, attention keeps its own as well
    output = q * b * t * (2 if shape.exchanges_heads else 1) + 4 * t * mixer.num_attention_heads
    return queries_and_keys + kv * b * t + output + gate


def _mla(mixer: Mla, shape: ActivationShape) -> float:
    b, t, heads = shape.element_bytes, shape.tokens, mixer.num_attention_heads
    qk = mixer.qk_nope_head_dim + mixer.qk_rope_head_dim
    latents = (mixer.q_lora_rank or 0) + mixer.kv_lora_rank
    if latents_of_all := gathered_latents_bytes(mixer, shape):
        # queries and the output, with a sum of each query's scores; keys and values are made again
        attention = heads * (b * (qk + mixer.v_head_dim) + 4)
        return t * (2 * b * latents + b * mixer.qk_rope_head_dim + attention) + latents_of_all
    if mixer.topk is None:
        # queries; keys, and what they and values are made of; the output, and a sum of each query's scores
        outputs = 2 if shape.exchanges_heads else 1
        attention = heads * (b * (2 * qk + mixer.qk_nope_head_dim + (1 + outputs) * mixer.v_head_dim) + 4)
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
        return dense_bytes(mlp, shape.tokens, shape)
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
    products = 7 if has_clamped_gates(mlp) else kept_products(gated=mlp.gated)
    widths = 2 * mlp.expert_width + products * mlp.moe_intermediate_size
    shared = 0.0 if mlp.shared is None else dense_bytes(mlp.shared, t, shape)
    # its output, and the number that it is multiplied with
    shared += b * t * (mlp.hidden_size + 1) if mlp.shared_gate else 0
    # what is sorted by expert is not kept as it was before
    latent = b * t * (mlp.latent_size or 0)
    return router + b * routed * widths + shared + latent


def dense_bytes(mlp: DenseMlp, tokens: float, shape: ActivationShape) -> float:
    """Return the bytes that a block which every token visits keeps, without its input."""
    return shape.element_bytes * tokens * kept_products(gated=mlp.gated) * mlp.intermediate_size


def has_clamped_gates(mlp: DenseMlp | Moe) -> bool:
    """Return whether it has gpt-oss's experts, whose gates are not SwiGLU."""
    return isinstance(mlp, Moe) and mlp.bias


def kept_products(*, gated: bool) -> int:
    """Return the number of products: gate, up and product; without a gate the squared values and their squares."""
    return 3 if gated else 2
