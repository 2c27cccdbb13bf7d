"""Work of a batch: operations by the kernel that does them, and its packing into micro-batches."""

from __future__ import annotations

import math
from bisect import bisect
from dataclasses import dataclass
from functools import lru_cache

from hpcrl.models.facts import ModelFacts
from hpcrl.models.flops import Flops
from hpcrl.models.packing import fill_bins, training_cost
from hpcrl.models.tensors import Part
from hpcrl.planning.lengths import Quantiles
from hpcrl.planning.tables.lookup import Matrix

_POINTS = 48
"""Lengths at which operations of a sequence are computed; they are smooth in the length."""


@dataclass(frozen=True, slots=True)
class Work:
    """Operations of a forward pass, by the kernels that do them."""

    linear: float
    """Matrix products with weights that every token visits."""
    experts: float
    """Grouped matrix products."""
    scores: float
    """Attention scores and weighted sums (and the scan of state-space layers and of linear attention)."""
    indexer: float
    """The indexer of sparse attention; it has no backward pass."""

    @property
    def total(self) -> float:
        """Return the sum of all operations."""
        return self.linear + self.experts + self.scores + self.indexer

    def scaled(self, factor: float) -> Work:
        """Return the work with every part times ``factor``."""
        return Work(self.linear * factor, self.experts * factor, self.scores * factor, self.indexer * factor)

    @classmethod
    def of(cls, flops: Flops) -> Work:
        """Return the work of the model's parts."""
        linear = flops.attention_projections + flops.router + flops.shared_experts + flops.dense_mlp + flops.lm_head
        return cls(linear, flops.experts, flops.attention_scores + flops.mamba + flops.linear_attention, flops.indexer)


@lru_cache(maxsize=64)
def tensor_counts(facts: ModelFacts, *, fp8: bool = False) -> tuple[int, int]:
    """Return the numbers of a checkpoint's tensors outside experts, and of experts; FP8 matrices have extra scales."""
    outside, experts = (2 if facts.tie_word_embeddings else 3), 0
    for layer in facts.layers:
        for weight in layer.weights:
            count = weight.copies * (2 if fp8 and weight.quantised else 1)
            if weight.part is Part.EXPERT:
                experts += count
            else:
                outside += count
    return outside, experts


@lru_cache(maxsize=64)
def matrices(facts: ModelFacts, *, experts: bool, tensor_parallel: int = 1) -> tuple[Matrix, ...]:
    """Return the matrix products of a forward pass on one rank: width of the result, inner width, how many.

    Of experts one is taken for all of a layer. Gate and up projection are one product, as kernels do them.
    """
    found: dict[tuple[float, float], float] = {}
    heads = 0 if experts else 1
    if heads:
        found[facts.vocab_size / tensor_parallel, float(facts.hidden_size)] = 1.0
    for layer in facts.layers:
        for weight in layer.weights:
            if (
                len(weight.shape) < 2
                or weight.name.endswith("bias")
                or (weight.part is Part.EXPERT) != experts
                or "gate_proj" in weight.name
            ):
                continue
            n, k = (float(size) for size in weight.shape[-2:])
            if "up_proj" in weight.name and "gate_up" not in weight.name:
                n *= 2.0
            if weight.tp_dim is not None and not experts:
                n, k = (n / tensor_parallel, k) if weight.tp_dim == 0 else (n, k / tensor_parallel)
            found[n, k] = found.get((n, k), 0.0) + 1.0
    return tuple((n, k, count) for (n, k), count in found.items())


def is_sparse(facts: ModelFacts) -> bool:
    """Return whether attention is sparse: its kernels work in the absorbed form."""
    return "mla+dsa" in facts.attention_kinds


@lru_cache(maxsize=64)
def sequence_work(facts: ModelFacts, lengths: Quantiles) -> Work:
    """Return the mean operations a token of causal sequences of these lengths, each token of the batch counted once."""
    total, tokens = Flops(), 0
    for length in lengths.sample(min(_POINTS, len(lengths.values))):
        size = max(1, round(length))
        total += facts.sequence_flops(size, absorbed=is_sparse(facts))
        tokens += size
    return Work.of(total).scaled(1.0 / tokens)


@lru_cache(maxsize=1024)
def token_work(facts: ModelFacts, context: float) -> Work:
    """Return the operations of one decoded token that sees ``context`` tokens."""
    return Work.of(facts.flops_per_token(context, absorbed=True))


@dataclass(frozen=True, slots=True)
class Packing:
    """Distribution of a batch over micro-batches.

    Attributes
    ----------
    micro_batches:
        Number of micro-batches of each group of ranks; all groups have the same number.
    tokens, rollouts:
        Numbers of the whole batch.
    critical_tokens:
        Sum over micro-batches of the work of the busiest group, in tokens of mean cost: the step waits for it, because
        groups meet in collectives after each layer.
    """

    micro_batches: int
    tokens: float
    critical_tokens: float
    rollouts: int = 1

    def imbalance(self, groups: int) -> float:
        """Return ``critical_tokens`` over an even share; 1 is perfect."""
        return self.critical_tokens * groups / self.tokens


PACKED = 4_096
"""Rollouts that are packed one by one, or eight a group of ranks: more of them are taken as even as these."""

_EACH_ROW = 256
"""Micro-batches a group up to which each number of them is tried; beyond, steps double."""


@lru_cache(maxsize=512)
def pack_rows(lengths: Quantiles, rollouts: int, groups: int, budget: int, facts: ModelFacts | None = None) -> Packing:
    """Pack a batch like the orchestrator: longest first to the least cost, as few micro-batches as the budget allows.

    Parameters
    ----------
    lengths:
        Tokens of a rollout.
    rollouts:
        Rollouts of a batch; their lengths are midpoints of the distribution.
    groups:
        Groups of ranks with micro-batches of their own.
    budget:
        Tokens of a micro-batch.
    facts:
        Facts of the model, whose operations are the cost; None: tokens are the cost.
    """
    packed = min(rollouts, max(PACKED, 8 * groups))
    sizes, costs = _sizes_and_costs(lengths, packed, facts)
    tokens = sum(sizes)
    rows = max(1, -(-int(sum(min(size, budget) for size in sizes)) // (budget * groups)))
    step = 1
    while (
        found := fill_bins(sizes, costs, budget=budget, bins=rows * groups)
        or fill_bins(sizes, sizes, budget=budget, bins=rows * groups)
    ) is None:
        # with many rows the smallest number of micro-batches is not worth a packing for each
        step = step if rows < _EACH_ROW else 2 * step
        rows += max(step, rows // 256)
    loads = [sum(costs[i] for i in items) for items in found[1]]
    loads.sort(reverse=True)
    times, critical = rollouts / packed, sum(loads[::groups]) / sum(loads)
    return Packing(math.ceil(times * rows), times * tokens, times * tokens * critical, rollouts)


@lru_cache(maxsize=16)
def _sizes_and_costs(lengths: Quantiles, count: int, facts: ModelFacts | None) -> tuple[list[float], list[float]]:
    """Return the tokens of ``count`` rollouts, the longest first, and their costs, for every way of packing."""
    sizes = [max(1.0, size) for size in reversed(lengths.sample(count))]
    return sizes, sizes if facts is None else _costs(facts, sizes)


def _costs(facts: ModelFacts, sizes: list[float]) -> list[float]:
    """Return `training_cost` of many rollouts, from the largest to the smallest, interpolated from some lengths."""
    cost, low, high = training_cost(facts), sizes[-1], sizes[0]
    points = sorted({max(1, round(low * (high / low) ** (i / _POINTS))) for i in range(_POINTS + 1)})
    at = [cost(point) for point in points]
    if len(points) == 1:
        return [at[0]] * len(sizes)
    found = []
    for size in sizes:
        i = min(max(bisect(points, size), 1), len(points) - 1)
        share = (size - points[i - 1]) / (points[i] - points[i - 1])
        found.append(max(at[i - 1] + share * (at[i] - at[i - 1]), 0.0))
    return found
