"""The work of an optimizer step on the busiest rank, and the seconds of its kernels."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from hpcrl.models.facts import ModelFacts
from hpcrl.planning.memory.activations import ActivationShape, saved_bytes
from hpcrl.planning.times.rates import Rates
from hpcrl.planning.times.shapes import TrainerShape
from hpcrl.planning.times.work import Packing, Work, is_sparse, matrices

_PARTS = ("linear", "experts", "scores", "indexer", "choice")
TOUCHED = 1.0
"""Number of times that kernels without products (norms, rotations, permutations, gates) move the kept bytes in a
forward pass: a value lies between such a kernel and a product, and one of both is bound by memory. With fused kernels a
layer of Qwen3-30B-A3B moves 190 KB a token and keeps 230."""
TOUCHED_BACKWARD = 1.25
"""The same of the backward pass: values and gradients are read, gradients written, those of products apart. 300 KB."""
BACKWARD_SCORES = 2.5
"""Operations of attention's backward pass over its forward pass: the scores are computed again."""


@dataclass(frozen=True)
class StepWork:
    """Inputs of a step from which its terms are computed."""

    facts: ModelFacts
    shape: TrainerShape
    packing: Packing
    work: Work
    rates: Rates
    _parts: dict[str, float] = field(default_factory=dict, repr=False)
    """Results of `part_s`, which each of the terms uses."""

    @property
    def gpu_tokens(self) -> float:
        """Return the tokens that the busiest rank works on in the step."""
        return self.packing.critical_tokens / self.shape.context_parallel

    @property
    def trained_share(self) -> float:
        """Share of the parameters that have gradients and an optimizer."""
        return 1.0 if self.shape.trained is None else self.shape.trained / self.facts.num_parameters()

    @property
    def backward_products(self) -> float:
        """Return the matrix products of the backward pass, for inputs and weights, relative to the forward pass."""
        return 1.0 + self.trained_share

    @property
    def backward_scores(self) -> float:
        """Return the seconds of attention's backward pass, relative to the forward pass."""
        if not self.sparse:
            return BACKWARD_SCORES / self.rates.calibration.constant("backward_attention_share")
        forward, backward = self.rates.sparse_shares(self.shape.sparse_kernels)
        return BACKWARD_SCORES * forward / backward

    @property
    def sparse(self) -> bool:
        """Return whether attention and its indexer are kernels for sparse attention, which fill a GPU by themselves."""
        return is_sparse(self.facts) and self.shape.compute_dtype != "float32"

    @property
    def expert_wait(self) -> float:
        """Return the tokens of the fullest rank of expert parallelism over their mean: the others wait for it."""
        if self.shape.expert_parallel == 1 or self.shape.balanced_experts:
            return 1.0
        return self.rates.calibration.constant("expert_imbalance")

    @property
    def choice_pairs(self) -> float:
        """Return the scores that are chosen among, over those that a query sees.

        Queries of a chunk choose among all keys up to the chunk's end; a rank of context parallelism has two chunks of
        each sequence.
        """
        chunks = 1 if self.shape.context_parallel == 1 else 2 * self.shape.context_parallel
        return 1.0 + 1.0 / chunks

    @property
    def busy(self) -> float:
        return self.rates.calibration.share("trainer_busy")

    @property
    def passes(self) -> float:
        """Return the forward passes of a step: the second one is the recomputation, of some layers or of all."""
        return 1 if self.shape.recompute == "none" else 1 + 1 / self.shape.recompute_every

    def part_passes(self, part: str) -> float:
        """Return the number of forward passes of one kind of kernel.

        Selective recomputation keeps the results of expensive kernels.
        """
        kept = self.shape.recompute == "selective" and part in ("scores", "indexer", "choice", "experts", "exchanges")
        return 1 if kept else self.passes

    def again_s(self) -> float:
        """Return the seconds of the recomputation's kernels."""
        products = sum((self.part_passes(name) - 1) * self.part_s(name) for name in _PARTS)
        return products + self.moved_s((self.passes - 1) * TOUCHED)

    def forward_s(self) -> float:
        """Return the seconds of a forward pass's kernels over the step's tokens, and of the gaps between them."""
        return sum(self.part_s(name) for name in _PARTS) + self.moved_s(TOUCHED)

    def moved_s(self, times: float) -> float:
        """Return the seconds to move the kept bytes of a forward pass ``times`` times through a GPU's memory."""
        return times * kept_bytes(self.facts) * self.gpu_tokens / self.rates.memory / self.busy

    def part_s(self, part: str) -> float:
        """Return the seconds of one kind of kernel in a forward pass."""
        if part not in self._parts:
            operations = self.operations(part) * self.gpu_tokens
            alone = self.sparse and part in ("scores", "indexer", "choice")
            busy = 1.0 if alone else self.busy
            self._parts[part] = operations / self.rate(part) / busy if operations else 0.0
        return self._parts[part]

    def operations(self, part: str) -> float:
        """Return the operations a token of one kind of kernel in a forward pass, on the rank that has most."""
        if part == "choice":
            # other trainers choose in a kernel that takes hardly any time
            chooses = self.sparse and self.shape.sparse_kernels != "libraries"
            return self.work.indexer * self.choice_pairs if chooses else 0.0
        each: float = getattr(self.work, part)
        return each * self.expert_wait if part == "experts" else each

    def rate(self, part: str) -> float:
        dtype = self.shape.compute_dtype
        match part:
            case "linear" | "experts":
                return self._matrix_rate(part == "experts", dtype)
            case _ if dtype == "float32":
                # attention, too, without tensor cores for it
                return self.rates.gemm("float32")
            case "scores":
                # attention stays in bfloat16
                return self._attention_rate()
            case "choice":
                return self.rates.index_choice
            case _:
                return self.rates.index_scores(self.shape.sparse_kernels)

    def _attention_rate(self) -> float:
        if self.sparse:
            return self.rates.sparse_forward(self.shape.sparse_kernels)
        length = self.packing.tokens / self.packing.rollouts
        share = self.rates.attention_share(self.facts, length, length)
        return self.rates.hardware.gpu_flops("bfloat16") * share if share else self.rates.attention

    def _matrix_rate(self, experts: bool, dtype: str) -> float:
        """Return the rate of products from measured times of these shapes, else from the general efficiency."""
        rows, facts = self.gpu_tokens / self.packing.micro_batches, self.facts
        if experts:
            rows *= self.shape.expert_parallel * facts.num_experts_per_tok / facts.num_experts
        kind = "grouped_gemm" if experts else "gemm"
        share = self.rates.matrix_share(matrices(facts, experts=experts), max(1.0, rows), dtype, kind)
        return self.rates.hardware.gpu_flops(dtype) * share if share else self.rates.gemm(dtype, experts)

    def backward_s(self) -> float:
        """Return the seconds of the backward pass's kernels without recomputation."""
        products = self.backward_products * (self.part_s("linear") + self.part_s("experts"))
        scores = self.part_s("scores")
        # a model without attention asks for no rate of it
        return products + (self.backward_scores * scores if scores else 0.0) + self.moved_s(TOUCHED_BACKWARD)


@lru_cache(maxsize=64)
def kept_bytes(facts: ModelFacts) -> float:
    """Return the bytes that are kept of a token, in bfloat16, where nothing is computed again."""
    tokens = 4096
    shape = ActivationShape(tokens=tokens, element_bytes=2)
    return sum(saved_bytes(layer, shape) for layer in facts.layers) / tokens
