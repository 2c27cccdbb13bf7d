"""Seconds of inference: a decode step by batch and context, and prompts. Formulas are in docs/planning.md."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache

from hpcrl.models.facts import ModelFacts
from hpcrl.models.layers import DenseMlp, Gqa, Mla
from hpcrl.models.tensors import Part
from hpcrl.planning.collectives import RankGroup, all_reduce, all_to_all
from hpcrl.planning.tables.lookup import Matrix
from hpcrl.planning.times.rates import Rates
from hpcrl.planning.times.shapes import EngineShape
from hpcrl.planning.times.terms import Seconds, TimeTable, attempt
from hpcrl.planning.times.work import Work, matrices, token_work

_FP8_SCALES = 1.0 + 4.0 / 128**2


@lru_cache(maxsize=64)
def _weights(facts: ModelFacts, dtype: str) -> tuple[float, float]:
    """Return the bytes that one decode step may read: outside experts, and all experts.

    Embeddings are looked up, not read.
    """
    parts = facts.weight_bytes("bfloat16" if dtype == "fp8" else dtype, fp8=dtype == "fp8")
    experts = float(parts.get(Part.EXPERT, 0))
    skipped = parts.get(Part.EMBEDDING, 0) if not facts.tie_word_embeddings else 0
    return sum(parts.values()) - experts - skipped, experts


@lru_cache(maxsize=1024)
def kv_read_bytes(facts: ModelFacts, context: float, dtype: str) -> float:
    """Return the bytes of cache that one token's attention reads.

    Sparse attention reads the indexer's keys of the whole context, and of the rest only the chosen tokens.
    """
    total = 0.0
    for layer, count in facts.distinct_layers:
        mixer = layer.mixer
        if mixer is None:
            continue
        per_token = mixer.kv_bytes_per_token(dtype)
        if isinstance(mixer, Mla) and mixer.topk is not None:
            keys = 0 if mixer.indexer is None else mixer.indexer.kv_bytes_per_token
            total += count * (context * keys + min(context, mixer.topk) * (per_token - keys))
        else:
            seen = mixer.seen(context) if isinstance(mixer, Gqa) else context
            total += count * (seen * per_token + mixer.state_bytes_per_sequence(dtype))
    return total


@dataclass(frozen=True)
class DecodeModel:
    """One side of serving, ready to say how long a step of it takes."""

    facts: ModelFacts
    shape: EngineShape
    rates: Rates

    __hash__ = object.__hash__

    @cached_property
    def _read(self) -> tuple[float, float]:
        """Return the weight bytes of a GPU outside of experts, and in experts."""
        dense, experts = _weights(self.facts, self.shape.weight_dtype)
        return dense / self.shape.tensor_parallel, experts / self.shape.expert_shards

    @cached_property
    def _matrices(self) -> tuple[tuple[Matrix, ...], tuple[Matrix, ...]]:
        """Return the products of one rank outside of experts, and in experts."""
        outside = matrices(self.facts, experts=False, tensor_parallel=self.shape.tensor_parallel)
        return outside, matrices(self.facts, experts=True)

    def seconds(self, batch: float, context: float) -> float:
        """Return the seconds of a step that decodes ``batch`` sequences of ``context`` tokens a data-parallel rank."""
        return sum(self._parts(batch, context).values())

    def _parts(self, batch: float, context: float) -> dict[str, float]:
        shape, rates = self.shape, self.rates
        work = token_work(self.facts, context)
        dense, experts = self._read
        tp = shape.tensor_parallel
        kv = batch * kv_read_bytes(self.facts, context, shape.kv_dtype)
        # latent attention: every rank of tensor parallelism reads the whole latent
        kv_share = 1 if _latent(self.facts) else tp
        return {
            "linear": self._linear_s(batch, work, dense),
            "experts": self._experts_s(batch, work, experts),
            "attention": max(kv / kv_share / rates.memory, self._scores_s(batch, work) / tp),
            "all_to_all": self._all_to_all_s(batch),
            "tensor_parallel": self._tensor_parallel_s(batch),
            "kernels": len(self.facts.layers) * rates.calibration.constant("layer_overhead_s"),
            "host": rates.calibration.constant("engine_step_overhead_s"),
        }

    def _linear_s(self, batch: float, work: Work, weight_bytes: float) -> float:
        shape, rates = self.shape, self.rates
        operations = batch * work.linear / shape.tensor_parallel
        if share := rates.matrix_share(self._matrices[0], batch, shape.weight_dtype, "gemm"):
            peak = rates.hardware.gpu_flops(shape.weight_dtype)
            return max(weight_bytes / rates.hardware.gpu_memory_rate, operations / peak) / share
        return max(weight_bytes / rates.memory, operations / rates.gemm(shape.weight_dtype))

    def _scores_s(self, batch: float, work: Work) -> float:
        scores = batch * work.scores / self.rates.attention
        return scores + (batch * work.indexer / self.rates.indexer if work.indexer else 0.0)

    def _experts_s(self, batch: float, work: Work, expert_bytes: float) -> float:
        """Return the seconds of experts, of which unchosen ones are not read: ``1 - (1 - k/E)^tokens`` are chosen."""
        facts, shape = self.facts, self.shape
        if not facts.num_experts:
            return 0.0
        # tokens of all data-parallel ranks that share these experts
        tokens = batch * max(1.0, shape.expert_parallel / shape.tensor_parallel)
        chosen = 1.0 - math.pow(1.0 - facts.num_experts_per_tok / facts.num_experts, tokens)
        operations = batch * work.experts / shape.tensor_parallel
        rows = max(1.0, tokens * facts.num_experts_per_tok / facts.num_experts)
        if share := self.rates.matrix_share(self._matrices[1], rows, shape.weight_dtype, "grouped_gemm"):
            peak, memory = self.rates.hardware.gpu_flops(shape.weight_dtype), self.rates.hardware.gpu_memory_rate
            return max(chosen * expert_bytes / memory, operations / peak) / share
        return max(chosen * expert_bytes / self.rates.memory, operations / self.rates.gemm(shape.weight_dtype, True))

    def _all_to_all_s(self, batch: float) -> float:
        facts, shape = self.facts, self.shape
        layers = facts.moe_layers
        if not shape.dispatches or not layers:
            return 0.0
        group = RankGroup.inner(shape.expert_parallel, shape.gpus_per_node)
        width = layers[0][1].expert_width
        copies = batch / shape.tensor_parallel * facts.num_experts_per_tok
        links = self.rates.low_latency
        dispatch = copies * width * (_FP8_SCALES if shape.weight_dtype == "fp8" else 2)
        both = all_to_all(dispatch, group, links) + all_to_all(copies * width * 2, group, links)
        return len(layers) * both

    def _tensor_parallel_s(self, batch: float) -> float:
        shape = self.shape
        if shape.tensor_parallel == 1:
            return 0.0
        group = RankGroup.inner(shape.tensor_parallel, shape.gpus_per_node)
        each = all_reduce(batch * self.facts.hidden_size * 2, group, self.rates.collectives)
        return tensor_parallel_sums(self.facts, shape) * each


def tensor_parallel_sums(facts: ModelFacts, shape: EngineShape) -> float:
    """Return the number of all-reduces of the hidden state over the ranks of tensor parallelism, in all layers.

    One after each mixer and each feed-forward block. Where experts have ranks of their own to go to, their outputs come
    back by the combine, to one rank of the tensor-parallel group each: what is left is an all-gather, half of it.
    """
    mixers = sum(layer.mixer is not None for layer in facts.layers)
    dense = sum(isinstance(layer.mlp, DenseMlp) for layer in facts.layers)
    return mixers + dense + len(facts.moe_layers) * (0.5 if shape.dispatches else 1.0)


def _latent(facts: ModelFacts) -> bool:
    return any(kind.startswith("mla") for kind in facts.attention_kinds)


_FORMULAS = {
    "linear": "max(weights / GPU memory, batch * operations / rate)",
    "experts": "max(chosen experts' weights / GPU memory, batch * operations / rate)",
    "attention": "max(KV read / GPU memory, batch * (scores + indexer) / rate)",
    "all_to_all": "sparse layers * (dispatch + combine + 2 * latency)",
    "tensor_parallel": "(mixers + blocks, sparse ones half where they dispatch) * all_reduce(batch * hidden * 2 B)",
    "kernels": "layers * layer_overhead_s",
    "host": "engine_step_overhead_s",
}


def decode_step(facts: ModelFacts, shape: EngineShape, rates: Rates, *, batch: float, context: float) -> TimeTable:
    """Return the terms of a decode step of ``batch`` sequences a data-parallel rank, each with ``context`` tokens."""
    model = DecodeModel(facts, shape, rates)
    dense, experts = _weights(facts, shape.weight_dtype)
    inputs: dict[str, dict[str, float | str]] = {
        "linear": {"weight bytes": dense / shape.tensor_parallel, "dtype": shape.weight_dtype},
        "experts": {"weight bytes": experts / shape.expert_shards, "EP": shape.expert_parallel},
        "attention": {"KV bytes a sequence": kv_read_bytes(facts, context, shape.kv_dtype), "context": context},
        "all_to_all": {"EP": shape.expert_parallel, "sparse layers": len(facts.moe_layers)},
        "kernels": {"layers": len(facts.layers)},
    }
    terms: list[Seconds] = []
    parts = cache(lambda: model._parts(batch, context))
    for name, formula in _FORMULAS.items():
        term = attempt(
            f"decode.{name}",
            lambda name=name: parts()[name],  # type: ignore[misc]
            formula,
            {"batch": batch, **inputs.get(name, {})},
        )
        if term.value != 0.0:
            terms.append(term)
    return TimeTable("decode step", tuple(terms))


def prefill_work(facts: ModelFacts, context: float) -> Work:
    """Return the operations of one prompt token that sees ``context`` tokens, without the LM head.

    The LM head is for the last token alone.
    """
    flops = facts.flops_per_token(context, absorbed="mla+dsa" in facts.attention_kinds)
    return Work.of(flops) if not flops.lm_head else _without_head(Work.of(flops), flops.lm_head)


def _without_head(work: Work, head: float) -> Work:
    return Work(work.linear - head, work.experts, work.scores, work.indexer)


def prefill_token(facts: ModelFacts, shape: EngineShape, rates: Rates, *, context: float) -> TimeTable:
    """Return the seconds of one GPU for one prompt token that sees ``context`` tokens.

    A replica has ``ranks`` GPUs for it.
    """
    work = prefill_work(facts, context)
    busy = rates.calibration.share("prefill_busy")
    dtype = shape.weight_dtype
    dense = matrices(facts, experts=False, tensor_parallel=shape.tensor_parallel)
    rows = max(1.0, _PROMPT_ROWS * shape.data_parallel * facts.num_experts_per_tok / max(1, facts.num_experts))

    def rate(kind: str) -> float:
        own, each = (dense, _PROMPT_ROWS) if kind == "gemm" else (matrices(facts, experts=True), rows)
        share = rates.matrix_share(own, each, dtype, kind)
        return rates.hardware.gpu_flops(dtype) * share if share else rates.gemm(dtype, kind == "grouped_gemm")

    def attention() -> float:
        share = rates.attention_share(facts, context, context)
        return rates.hardware.gpu_flops("bfloat16") * share if share else rates.attention

    terms = [
        attempt("prefill.linear", lambda: work.linear / rate("gemm") / busy, _PREFILL, {"dtype": dtype}),
        attempt("prefill.attention", lambda: work.scores / attention() / busy, _PREFILL, {"context": context}),
    ]
    if work.experts:
        terms.insert(1, attempt("prefill.experts", lambda: work.experts / rate("grouped_gemm") / busy, _PREFILL))
    if work.indexer:
        terms.append(attempt("prefill.indexer", lambda: work.indexer / rates.indexer / busy, _PREFILL))
    if shape.tensor_parallel > 1:
        terms.append(_prefill_tensor_parallel(facts, shape, rates))
    if shape.dispatches and facts.moe_layers:
        compute = sum(term.value or 0.0 for term in terms if term.name != "prefill.tensor_parallel")
        terms += _prefill_all_to_all(facts, shape, rates, compute)
    return TimeTable("prompt token", tuple(terms))


_PROMPT_ROWS = 8192.0
"""Tokens of a prompt step of one data-parallel rank, as far as measured times of matrix products depend on them."""
_PREFILL = "operations / rate / prefill_busy"


def _prefill_tensor_parallel(facts: ModelFacts, shape: EngineShape, rates: Rates) -> Seconds:
    """Return the seconds of one token's sums; all ranks of a group take part, so a token costs each of them."""
    group = RankGroup.inner(shape.tensor_parallel, shape.gpus_per_node)
    sums, token_bytes = tensor_parallel_sums(facts, shape), facts.hidden_size * 2

    def seconds() -> float:
        links = replace(rates.collectives, hop_s=0.0, local_hop_s=0.0)
        return shape.tensor_parallel * sums * all_reduce(token_bytes, group, links)

    return attempt(
        "prefill.tensor_parallel",
        seconds,
        "TP * sums * all_reduce(hidden * 2 B), without latency",
        {"TP": shape.tensor_parallel, "sums": sums, "bytes": token_bytes},
    )


def _prefill_all_to_all(facts: ModelFacts, shape: EngineShape, rates: Rates, compute_s: float) -> list[Seconds]:
    """Return the seconds of one token's exchanges; messages are large, so their latency does not count.

    Two batches take turns: what one sends hides behind what the other computes, and only the excess counts.
    """
    group = RankGroup.inner(shape.expert_parallel, shape.gpus_per_node)
    width = facts.moe_layers[0][1].expert_width
    # a copy for each node that has a chosen expert, forwarded over NVLink there
    nodes = group.nodes
    far = nodes * (1 - (1 - 1 / nodes) ** facts.num_experts_per_tok) * (nodes - 1) / nodes
    near = float(facts.num_experts_per_tok)
    bytes_each = width * ((_FP8_SCALES if shape.weight_dtype == "fp8" else 2) + 2)

    def seconds() -> float:
        links = rates.all_to_all
        through_nics = far * bytes_each * links.gpus_per_node / links.node if nodes > 1 else 0.0
        return len(facts.moe_layers) * max(through_nics, near * bytes_each / links.gpu)

    inputs: dict[str, float | str] = {
        "copies to other nodes": far,
        "bytes of a copy": bytes_each,
        "sparse layers": len(facts.moe_layers),
    }
    formula = "sparse layers * max(copies to other nodes * bytes / adapters, top-k * bytes / NVLink)"
    return [
        attempt("prefill.all_to_all", seconds, formula, inputs, counts=False),
        attempt(
            "prefill.exposed",
            lambda: max(0.0, seconds() - compute_s),
            "max(0, all_to_all - compute): two batches take turns",
        ),
    ]
