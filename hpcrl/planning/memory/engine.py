"""Memory of one GPU of an inference engine, and how many tokens of KV cache it holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from hpcrl.models.facts import ModelFacts, weight_bytes
from hpcrl.models.layers import Gqa, Layer, Mla
from hpcrl.models.tensors import DTYPE_BYTES, Part
from hpcrl.planning.ledger import GIB, Ledger, Term

RUNTIME_BYTES = int(2.0 * GIB)
"""Bytes of the CUDA context, NCCL, and other memory of vLLM's process on a GPU than tensors."""
GRAPH_BYTES = int(1.5 * GIB)
"""CUDA graphs of decode, captured for a ladder of batch sizes."""
DEEPEP_BUFFER_BYTES = int(1.0 * GIB)
"""A buffer that vLLM gives DeepEP for NVLink, and its high-throughput kernels another one of this size for RDMA
(``VLLM_DEEPEP_BUFFER_SIZE_MB``, 1,024 unless it is set)."""
_SCALED_CHANNELS = 128
"""Channels of a combined token that share a bfloat16 minimum and maximum in DeepEP's low-latency messages."""

_KEYS_A_LATENT = 8
"""Indexer keys that vLLM gathers where it would unpack one latent (``get_max_prefill_buffer_size``)."""
_PADDED_HEADS = 64
"""Multiple to which FlashMLA's sparse kernel for prompts pads the number of heads on Hopper."""
_SCORES_BYTES = 512 << 20
"""Scores of indexers that vLLM holds at a time (``VLLM_SPARSE_INDEXER_MAX_LOGITS_MB``, 512 unless it is set)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Inputs of the memory of an engine.

    Attributes
    ----------
    ranks, nodes:
        GPUs of a replica: ``tp`` of them share a data-parallel rank, and all of them share the experts; and its nodes.
    max_num_seqs, max_num_batched_tokens:
        Limits of this kind of engine (`hpcrl.config.engine_shape.step_limits`): each side has its own.
    gpu_memory_utilization:
        Share of a GPU that the engine may use.
    kv_cache_bytes:
        Bytes of the KV cache of a GPU; None: what the engine's other needs leave of its share.
    prompts_only:
        Whether it is a prefill engine: without CUDA graphs.
    low_latency:
        Whether it uses DeepEP's low-latency kernels (a decode engine) in place of its high-throughput ones.
    """

    ranks: int
    nodes: int = 1
    tp: int = 1
    dtype: str = "bfloat16"
    fp8_weights: bool = False
    kv_dtype: str = "bfloat16"
    max_model_len: int = 32768
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 8192
    gpu_memory_utilization: float = 0.9
    kv_cache_bytes: int | None = None
    prompts_only: bool = False
    low_latency: bool = False

    @property
    def data_parallel(self) -> int:
        """Return the number of ranks with their own sequences."""
        return self.ranks // self.tp


@dataclass(frozen=True, slots=True)
class KvCapacity:
    """Capacity of the KV cache of one data-parallel rank.

    Attributes
    ----------
    cache_bytes:
        Bytes on each GPU.
    tokens:
        Tokens that fit.
    sequences:
        Sequences of full length that fit (a fraction below one: not even a single one).
    """

    cache_bytes: int
    tokens: int
    sequences: float


@lru_cache(maxsize=4096)
def engine_ledger(facts: ModelFacts, memory: EngineMemory) -> Ledger:
    """Return the memory of a GPU outside the KV cache."""
    return Ledger.of("serving", _terms(facts, memory))


@lru_cache(maxsize=4096)
def kv_bytes_of_rank(facts: ModelFacts, memory: EngineMemory, length: int = 1) -> int:
    """Return the bytes of KV cache of a sequence of ``length`` on one GPU, by the tokens that layers must keep.

    Latents are whole on each GPU, heads are distributed (one at least).
    """
    return sum(_layer_kv(layer, memory, length) for layer in facts.layers)


def _layer_kv(layer: Layer, memory: EngineMemory, length: int) -> int:
    mixer = layer.mixer
    if mixer is None:
        return 0
    whole = mixer.kv_bytes_per_token(memory.kv_dtype) * mixer.kept_tokens(length)
    if not isinstance(mixer, Gqa):
        return whole
    heads = mixer.num_key_value_heads
    return whole * ceil(heads / memory.tp) // heads


def kv_capacity(facts: ModelFacts, memory: EngineMemory, gpu_bytes: int) -> KvCapacity:
    """Return the capacity for the KV cache in the free memory of a GPU, in tokens and sequences of ``max_model_len``.

    Tokens are counted for such sequences too: where layers have a window, shorter sequences fit fewer tokens.
    """
    left = max(0, round(gpu_bytes * memory.gpu_memory_utilization) - engine_ledger(facts, memory).total)
    left = left if memory.kv_cache_bytes is None else min(left, memory.kv_cache_bytes)
    state = facts.state_bytes_per_sequence(memory.kv_dtype) // memory.tp
    kv = kv_bytes_of_rank(facts, memory, memory.max_model_len)
    per_sequence = kv + state
    tokens = left * memory.max_model_len // kv if kv else 0
    return KvCapacity(left, tokens, left / per_sequence if per_sequence else 0.0)


def _terms(facts: ModelFacts, m: EngineMemory) -> Iterator[Term | None]:
    by_part = facts.weight_bytes(m.dtype, fp8=m.fp8_weights)
    experts = by_part.get(Part.EXPERT, 0)
    dtype = "fp8" if m.fp8_weights else m.dtype
    inputs: dict[str, float | str] = {"W": experts, "ranks": m.ranks, "dtype": dtype}
    yield Term("expert weights", experts // m.ranks, "W_experts / ranks", inputs)
    cut, whole = _dense_weights(facts, m.dtype, m.fp8_weights)
    value = cut // m.tp + whole
    yield Term("other weights", value, "W_cut / TP + W_whole", {"W_cut": cut, "W_whole": whole, "TP": m.tp})
    yield _absorbed(facts, m)
    yield from _sparse_attention(facts, m)
    d, v, b, t = facts.hidden_size, facts.vocab_size, 2 if m.dtype != "float32" else 4, m.max_num_batched_tokens
    k = max(facts.num_experts_per_tok, 1)
    width = facts.moe_layers[0][1].moe_intermediate_size if facts.moe_layers else 0
    workspace = t * b * (6 * d + k * (d + 3 * width))
    formula = "T b (6 D + k (D + 3 F))"
    yield Term("activations of a step", workspace, formula, {"T": t, "b": b, "D": d, "k": k, "F": width})
    # float32 logits, and the copy that sampling sorts
    logits = 2 * 4 * m.max_num_seqs * v
    yield Term("logits", logits, "2 · 4 · sequences · V", {"sequences": m.max_num_seqs, "V": v})
    if m.ranks > 1 and facts.moe_layers:
        yield _dispatch(facts, m)
    yield Term("runtime", RUNTIME_BYTES, "constant", {}, "assumed")
    if not m.prompts_only:
        yield Term("CUDA graphs", GRAPH_BYTES, "constant", {}, "assumed")


def _latent_layers(facts: ModelFacts) -> list[Mla]:
    return [layer.mixer for layer in facts.layers if isinstance(layer.mixer, Mla)]


def _absorbed(facts: ModelFacts, m: EngineMemory) -> Term | None:
    """Return the term of the two halves of ``kv_b_proj``, which vLLM multiplies into queries and outputs in decoding.

    Where the weights are in FP8 it makes a copy of them in bfloat16 and keeps the FP8 ones for prompts
    (``MLACommonImpl.process_weights_after_loading``); in bfloat16 both halves are views.
    """
    layers = _latent_layers(facts)
    if not layers or not m.fp8_weights:
        return None
    value = 0
    for mixer in layers:
        heads = ceil(mixer.num_attention_heads / m.tp)
        value += 2 * heads * mixer.kv_lora_rank * (mixer.qk_nope_head_dim + mixer.v_head_dim)
    first = layers[0]
    inputs: dict[str, float | str] = {
        "layers": len(layers),
        "H": first.num_attention_heads,
        "TP": m.tp,
        "kv_lora": first.kv_lora_rank,
        "nope + v": first.qk_nope_head_dim + first.v_head_dim,
    }
    formula = "2 · layers · H / TP · kv_lora (nope + v)"
    return Term("absorbed projections", value, formula, inputs, "vLLM, MLA with FP8 weights")


def _sparse_attention(facts: ModelFacts, m: EngineMemory) -> Iterator[Term | None]:
    """Yield the workspaces of sparse attention, which all layers share.

    One holds either the latents that are unpacked for a kernel in bfloat16, with its queries, or the indexer's keys
    gathered from the cache; another the scores of queries against keys, cut into pieces of a fixed size.
    """
    sparse = [mixer for mixer in _latent_layers(facts) if mixer.indexer is not None]
    if not sparse or sparse[0].indexer is None:
        return
    mixer, length, t = sparse[0], m.max_model_len, m.max_num_batched_tokens
    width = mixer.kv_lora_rank + mixer.qk_rope_head_dim
    # default of vLLM's `sparse_mla_prefill_workspace_factor`
    contexts = 5 if length <= 256 << 10 else 2
    key = sparse[0].indexer.kv_bytes_per_token
    keys = _KEYS_A_LATENT * contexts * length * key
    heads = ceil(mixer.num_attention_heads / m.tp)
    latents = 2 * t * heads * width
    if m.kv_dtype == "fp8":
        padded = -(-heads // _PADDED_HEADS) * _PADDED_HEADS
        outputs = t * (padded * (width + mixer.kv_lora_rank) + heads * mixer.kv_lora_rank)
        latents += 2 * (contexts * length * width + outputs)
    inputs: dict[str, float | str] = {
        "max_model_len": length,
        "contexts": contexts,
        "key": key,
        "kv_lora + rope": width,
        "T": t,
        "H": heads,
    }
    formula = (
        "max(8 · contexts · max_model_len · key, 2 (kv_lora + rope) contexts · max_model_len + queries and outputs)"
    )
    yield Term("sparse attention workspace", max(keys, latents), formula, inputs, "vLLM, FlashMLA sparse")
    yield Term(
        "indexer scores",
        min(_SCORES_BYTES, 4 * t * length),
        "min(512 MiB, 4 · T · max_model_len)",
        {"T": t, "max_model_len": length},
        "vLLM, sparse indexer",
    )


def _dispatch(facts: ModelFacts, m: EngineMemory) -> Term:
    """Return the term of DeepEP's buffers, as vLLM requests them (its ``device_communicators/all2all.py``).

    Low-latency kernels keep a place for every token that a rank may dispatch at every expert, to send and to receive,
    each twice for odd and even steps (DeepEP's ``LowLatencyLayout``). vLLM's cap of dispatched tokens is
    ``max_num_batched_tokens`` of the engine, however few sequences it runs. A message is a token in bfloat16 with a
    minimum and a maximum for each 128 channels, or with 16 bytes of control; the larger one counts.
    """
    if not m.low_latency:
        buffers = 1 + (m.nodes > 1)
        source = "vLLM, DeepEP high throughput"
        return Term("expert dispatch", buffers * DEEPEP_BUFFER_BYTES, "buffers · 1 GiB", {"buffers": buffers}, source)
    d, e, cap = facts.moe_layers[0][1].expert_width, facts.num_experts, m.max_num_batched_tokens
    message = 2 * d + max(16, 4 * (d // _SCALED_CHANNELS))
    value = DEEPEP_BUFFER_BYTES + 4 * e * cap * message
    formula = "1 GiB + 4 · E · max_num_batched_tokens · (2 D + 4 D / 128)"
    inputs = {"E": e, "max_num_batched_tokens": cap, "D": d}
    return Term("expert dispatch", value, formula, inputs, "vLLM, DeepEP low latency")


@lru_cache(maxsize=64)
def _dense_weights(facts: ModelFacts, dtype: str, fp8: bool) -> tuple[int, int]:
    """Return the bytes of all but experts: those that tensor parallelism cuts, and those that each rank has whole."""
    by_part = facts.weight_bytes(dtype)
    cut = by_part.get(Part.EMBEDDING, 0) + by_part.get(Part.LM_HEAD, 0)
    whole = facts.hidden_size * DTYPE_BYTES[dtype]
    for layer in facts.layers:
        for weight in layer.weights:
            if weight.part is Part.EXPERT:
                continue
            size = weight_bytes(weight, dtype, fp8=fp8)
            if weight.tp_dim is None:
                whole += size
            else:
                cut += size
    return cut, whole
