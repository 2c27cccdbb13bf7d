"""Memory of one trainer rank: what is held at each moment of a step, term by term.

The peak is the largest of a few moments: the logits, the backward pass of some layer, its reduce-scatter, the
optimizer's update, publishing and loading. `trainer_moments` gives them all; `trainer_peak` the one that binds.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import chain

from hpcrl.models.facts import ModelFacts
from hpcrl.models.layers import Gqa, Layer, Mla
from hpcrl.models.tensors import DTYPE_BYTES
from hpcrl.planning.ledger import Ledger, Term
from hpcrl.planning.memory.activations import saved_bytes, saved_op_output_bytes
from hpcrl.planning.memory.layer_backward import BackwardStage, backward_stages, stage_terms
from hpcrl.planning.memory.logits import logits_term
from hpcrl.planning.memory.optimizer import moments_term, muon_batch_term, staging_term
from hpcrl.planning.memory.settings import (
    CUDA_BYTES,
    FRAGMENTATION,
    NCCL_BYTES,
    OFFLOAD_BUCKETS,
    TrainerMemory,
    checkpoint_term,
    image_term,
    reference_term,
    trained_parameters,
)
from hpcrl.planning.memory.sharded import ShardedParameters, of_all_layers

_DEEPEP_ALIGNMENT, _DEEPEP_PAGE = 32, 2 << 20
"""Multiples, in bytes, that DeepEP rounds the parts of a token and its whole buffer up to."""


def trainer_peak(facts: ModelFacts, memory: TrainerMemory) -> Ledger:
    """Return the moment with the largest memory."""
    return max(trainer_moments(facts, memory), key=lambda ledger: ledger.total)


def trainer_moments(facts: ModelFacts, memory: TrainerMemory) -> tuple[Ledger, ...]:
    """Return the ledger of each moment."""
    return tuple(_Trainer(facts, memory).moments())


def trainer_fits(facts: ModelFacts, memory: TrainerMemory, capacity: int) -> bool:
    """Return whether `trainer_peak` is at most ``capacity`` bytes; the first moment above it ends the search."""
    planner = _Trainer(facts, memory)
    # most configurations that do not fit exceed the memory already at the update, which needs no layer
    last = planner.at_the_update()
    return last.total <= capacity and all(ledger.total <= capacity for ledger in planner.moments())


class _Trainer:
    """The terms of one configuration."""

    def __init__(self, facts: ModelFacts, memory: TrainerMemory) -> None:
        self.facts, self.m = facts, memory
        self.sizes = ShardedParameters(facts, shards=memory.shards, ep=memory.ep)
        self.trained = trained_parameters(facts, memory.lora)
        self.layers: tuple[Layer, ...] = facts.layers
        self.shape = memory.activations
        self._stages: dict[int, BackwardStage] = {}

    @cached_property
    def activations(self) -> tuple[list[int], list[int]]:
        """Return the bytes kept from forward to backward, and those needed again in a layer's backward, by layer."""
        m, shape = self.m, self.shape
        whole = of_all_layers(self.facts, lambda i: saved_bytes(self.layers[i], shape))
        if m.activation_checkpointing == "none":
            return whole, [0] * len(whole)
        inputs = m.tokens * self.facts.hidden_size * m.element_bytes
        kept, working = list(whole), [0] * len(whole)
        for i in range(0, len(whole), m.checkpoint_every_layers):
            # the first norm keeps the input of the layer, which is counted already
            kept[i], working[i] = 0 if m.offloads_activations else inputs, whole[i] - inputs
            if m.activation_checkpointing == "selective":
                kept[i] += saved_op_output_bytes(self.layers[i], shape, ep=m.ep, cp=m.cp)
                # what is kept of operators is used as it is; exchanges have made what others copy
                working[i] -= saved_op_output_bytes(self.layers[i], shape)
        return kept, working

    # -- standing terms ------------------------------------------------------------------------------------------

    def standing(self, *, gradients: float, buckets: int = OFFLOAD_BUCKETS - 1) -> Iterator[Term | None]:
        """Yield the terms that are held all the time, and ``gradients`` (a share of all of them).

        With an optimizer on the host, two buckets are fetched before the update; there each of ``buckets`` has a
        buffer.
        """
        m, n, trained = self.m, self.m.shards, self.trained
        if not (m.reference_on_host and m.has_host):
            yield reference_term(self.facts, m)
        if m.parameter_offload and m.device == "cuda":
            yield self._runtime()
            yield self._dispatch()
            yield self._replay()
            return
        yield self._weights()
        if not m.optimizer_offload:
            yield moments_term(self.facts, m, self.trained)
        else:
            yield staging_term(self.facts, m, trained, buckets)
            if not m.has_host:
                yield moments_term(self.facts, m, self.trained)
        share = {"P": trained, "N": n, "share": gradients}
        yield Term("gradients", round(4 * trained / n * gradients), "4 P / N · share", share)
        yield self._padding(gradients=gradients, moments=not (m.optimizer_offload and m.has_host))
        if m.device == "cpu":
            # otherwise they are in the memory of the host
            yield image_term(self.facts, m)
            yield checkpoint_term(self.facts, m)
        yield self._runtime()
        yield self._dispatch()
        yield self._replay()

    def _weights(self) -> Term:
        m, n, trained = self.m, self.m.shards, self.trained
        width = 4 if m.lora is None else m.element_bytes
        return Term(
            "master weights",
            (width * self.sizes.all + (0 if m.lora is None else 4 * trained)) // n,
            "4 P / N" if m.lora is None else "(b P + 4 A) / N",
            {"P": self.sizes.all, "N": n, "A": trained, "b": m.element_bytes},
        )

    def _padding(self, *, gradients: float = 0.0, moments: bool = False) -> Term:
        """Return the padding by which FSDP2 gives ranks equal parts; the padding of adapters is not counted."""
        m = self.m
        width = 4 + 4 * gradients + 8 * moments if m.lora is None else m.element_bytes
        inputs = {"width": width, "padding": self.sizes.padding, "N": m.shards}
        return Term("padding of shards", round(width * self.sizes.padding / m.shards), "width · padding / N", inputs)

    def _runtime(self) -> Term | None:
        m = self.m
        if m.device != "cuda":
            return None
        groups = 1 + (m.ep > 1) + (m.cp > 1)
        return Term(
            "CUDA and NCCL",
            CUDA_BYTES + groups * NCCL_BYTES,
            "context + groups · communicator",
            {"context": CUDA_BYTES, "groups": groups, "communicator": NCCL_BYTES},
            "assumed",
        )

    def _dispatch(self) -> Term | None:
        """Return the term of DeepEP's buffer, shared by layers: the maximum of one exchange, in whole pages.

        By the layouts of ``dispatch.cuh`` and ``combine.cuh`` in DeepEP 2.1, of ranks that reach each other by NVLink.
        A token travels with its experts and weights, and outwards with its source, too.
        """
        m = self.m
        if not m.deepep_tokens or m.ep == 1:
            return None
        t, r, k, hidden = m.deepep_tokens, m.ep, self.facts.num_experts_per_tok, 2 * self.facts.hidden_size
        sent, returned = (
            rooms * t * (_aligned(hidden, _DEEPEP_ALIGNMENT) + _aligned(rest, _DEEPEP_ALIGNMENT))
            for rooms, rest in ((r, 8 * k + 4 * (1 + k)), (min(r, k), 8 * k))
        )
        inputs = {"T": t, "ranks": r, "D": self.facts.hidden_size, "k": k}
        value = _aligned(max(sent, returned), _DEEPEP_PAGE)
        return Term("DeepEP buffer", value, "ranks · T · (2 D + 12 k + 4)", inputs, "DeepEP 2.1")

    def _replay(self) -> Term | None:
        if not self.m.router_replay:
            return None
        layers, k = len(self.facts.moe_layers), self.facts.num_experts_per_tok
        width = 1 if self.facts.num_experts <= 256 else 2
        value = self.m.tokens * layers * k * width
        inputs = {"T": self.m.tokens, "layers": layers, "k": k, "w": width}
        return Term("router replay", value, "T · layers · k · w", inputs)

    def _root_gathered(self) -> Term | None:
        """Return the term of the embedding that is also the head: gathered until it has its gradient."""
        b, g = self.m.element_bytes, self.sizes.wide_root
        if self.sizes.head:
            return None
        return Term("gathered embedding", b * g, "b · g_root", {"b": b, "g_root": g})

    def _head_gathered(self) -> Term | None:
        b, g = self.m.element_bytes, self.sizes.wide_head
        return Term("gathered head", b * g, "b · g_head", {"b": b, "g_head": g}) if g else None

    def _kept(self, upto: int, *, free: int = 0) -> Iterator[Term | None]:
        """Yield the activations of layers below ``upto`` without ``free`` bytes; not those that wait on the host."""
        m = self.m
        how = m.activation_checkpointing
        if m.offloads_activations:
            # and the layer that is computed
            layer = m.tokens * self.facts.hidden_size * m.element_bytes
            # of a few layers less than the bound is under way
            value = layer + max(layer, min(m.offload_in_flight_bytes, upto * layer))
            sizes: dict[str, float | str] = {"bound": m.offload_in_flight_bytes, "T": m.tokens, "layers": upto}
            yield Term("activations in transfer", value, "b T D + max(min(bound, layers b T D), b T D)", sizes)
        inputs: dict[str, float | str] = {"layers": upto, "T": m.tokens, "checkpointing": how}
        yield Term("activations", sum(self.activations[0][:upto]) - free, "Σ a_l over layers", inputs)
        yield Term("rotary tables", 8 * m.tokens * _rotary_dim(self.facts), "8 T r", {"T": m.tokens})

    def _fragments(self, terms: list[Term]) -> Term | None:
        if self.m.device != "cuda":
            return None
        inputs = {"share": FRAGMENTATION}
        value = round(FRAGMENTATION * sum(term.value for term in terms))
        return Term("fragmentation", value, "share · tensors", inputs, "assumed")

    def _ledger(self, moment: str, terms: Iterator[Term | None]) -> Ledger:
        present = [term for term in terms if term is not None]
        return Ledger.of(moment, [*present, self._fragments(present)])

    # -- moments -------------------------------------------------------------------------------------------------

    def moments(self) -> Iterator[Ledger]:
        """Yield the moments that may have the largest memory."""
        yield self._ledger("logits", self._head())
        if self.sizes.head and self.m.lora is None:
            yield self._ledger("reduction of the head", self._head_reduction())
        for name, terms in (("backward", self._backward), ("reduction", self._reduction)):
            ledgers = (self._ledger(f"{name} of layer {i}", terms(i)) for i in self._candidates)
            yield max(ledgers, key=lambda ledger: ledger.total)
        yield self.at_the_update()
        yield self._ledger("publishing", self._publishing())
        yield self._ledger("loading", self._loading())

    def at_the_update(self) -> Ledger:
        """Return the ledger while the optimizer works."""
        standing = self.standing(gradients=1.0, buckets=OFFLOAD_BUCKETS)
        return self._ledger("optimizer", chain(standing, [muon_batch_term(self.facts, self.m)]))

    @cached_property
    def _candidates(self) -> list[int]:
        """Return the layers where a peak may be: the ends of a row of equal layers, where terms change steadily."""
        last = len(self.layers) - 1
        kinds = list(zip(self.sizes.gathered, *self.activations, map(_has_indexer, self.layers), strict=True))
        edges = {i for i in range(last) if kinds[i] != kinds[i + 1]}
        near = {0, 1, last - 1, last} | edges | {i + 1 for i in edges} | {i + 2 for i in edges}
        return sorted(i for i in near if 0 <= i <= last)

    def _head(self) -> Iterator[Term | None]:
        m, d = self.m, self.facts.hidden_size
        yield from self.standing(gradients=1.0 if m.accumulates else 0.0)
        yield self._root_gathered()
        yield self._head_gathered()
        if m.lm_head_chunk_tokens is None or m.loss_of_rollouts:
            # the head's backward pass has begun; otherwise its gradient comes with its forward pass
            yield self._prefetched(len(self.layers))
        if m.real is not None:
            yield _real_term(m.real.head)
            return
        yield from self._kept(len(self.layers))
        n, b, t = m.logit_tokens, m.element_bytes, m.tokens
        inputs = {"T": t, "D": d, "n": n, "b": b}
        yield Term("final norm and selection", (t + n) * d * b, "(T + n) D b", inputs)
        yield logits_term(self.facts, m)

    def _reduced(self, i: int) -> float:
        """Share of the gradients that exist before layer ``i`` is reduced."""
        return 1.0 if self.m.accumulates else self.sizes.above[i] / self.sizes.all

    def _prefetched(self, i: int) -> Term | None:
        """Return the term of the layer that the backward pass needs next, gathered ahead.

        FSDP2 gathers nothing ahead that a rank has alone: it is copied when its layer begins.
        """
        g = self.sizes.travelling(self.sizes.wide[i - 1], i - 1) if i > 0 else 0
        if not g:
            return None
        b = self.m.element_bytes
        return Term("prefetched layer", b * g, "b · g_l", {"b": b, "g_l": g})

    def _stage(self, i: int) -> BackwardStage:
        """Return the stage of layer ``i`` with the largest memory; equal layers have the same."""
        found = self._stages.get(self.facts.alike[i])
        if found is None:
            m, width = self.m, self.m.element_bytes if self.m.lora is None else 0
            p, context = self.sizes.gathered[i], m.tokens * m.cp
            stages = backward_stages(self.layers[i], self.shape, p, ep=m.ep, fp8=m.fp8, context=context)
            found = self._stages[self.facts.alike[i]] = max(stages, key=lambda stage: stage.total(width))
        return found

    def _backward(self, i: int) -> Iterator[Term | None]:
        m, b = self.m, self.m.element_bytes
        yield from self.standing(gradients=self._reduced(i))
        yield self._root_gathered()
        yield self._root_gradient()
        if m.real is not None and m.real.whole > m.real.head:
            yield _real_term(m.real.whole)
            ready = float(self.sizes.gathered[i])
        else:
            stage, working = self._stage(i), self.activations[1][i]
            ready, free = stage.made + stage.ready, round(saved_bytes(self.layers[i], self.shape) - stage.saved)
            yield from self._kept(i + 1, free=max(0, free - working))
            yield from stage_terms(stage, max(0, working - free) if working else None)
        yield Term("gathered layer", b * self.sizes.wide[i], "b · g_l", {"b": b, "g_l": self.sizes.wide[i]})
        yield self._prefetched(i)
        if m.lora is None:
            yield Term("layer gradient", round(b * ready), "b · p_l that is done", {"b": b, "p_l": ready})
            if held := self._reduced_above(i):
                yield Term("gradient in reduction", 4 * held, "4 g_l of the layer above", {"g_l": held})

    def _reduced_above(self, i: int) -> int:
        sizes = self.sizes
        if i + 1 < len(self.layers):
            return sizes.travelling(sizes.wide[i + 1], i + 1)
        return sizes.travelling(sizes.wide_head)

    def _root_gradient(self) -> Term | None:
        """Return the term of a tied head's gradient; None for a separate head, which is reduced before layers."""
        m = self.m
        if m.lora is not None or self.sizes.head:
            return None
        inputs = {"b": m.element_bytes, "p_root": self.sizes.root}
        return Term("gradient of the head", m.element_bytes * self.sizes.root, "b · p_root", inputs)

    def _reduction(self, i: int) -> Iterator[Term | None]:
        m, p = self.m, self.sizes.wide[i]
        yield from self.standing(gradients=self._reduced(i))
        yield self._root_gathered()
        yield self._root_gradient()
        yield from self._kept(i)
        yield self._prefetched(i)
        if m.lora is None:
            yield from self._reduced_parameters(p, self.sizes.travelling(p, i), m.shards // m.ep)

    def _head_reduction(self) -> Iterator[Term | None]:
        yield from self.standing(gradients=1.0 if self.m.accumulates else 0.0)
        yield from self._kept(len(self.layers))
        yield self._prefetched(len(self.layers))
        head = self.sizes.wide_head
        yield from self._reduced_parameters(head, self.sizes.travelling(head), self.m.shards)

    def _reduced_parameters(self, p: int, travelling: int, shards: int) -> Iterator[Term]:
        # gloo reduces a copy of its input
        b, copies, here = self.m.element_bytes, 2 if self.m.device == "cpu" else 1, p - travelling
        inputs = {"g_l": travelling, "copies": copies}
        yield Term("gradient in reduction", copies * 4 * travelling, "copies · 4 g_l", inputs)
        yield Term("reduced gradient", 4 * travelling // shards, "4 g_l / (N / EP)", {"g_l": travelling, "N": shards})
        if here:
            # copied to float32, and a gradient for the optimizer after that
            yield Term("gradient that stays", (b + 4) * here, "(b + 4) p_l", {"b": b, "p_l": here})

    def _publishing(self) -> Iterator[Term | None]:
        """Yield the terms of publishing, tensor by tensor into the image; unconverted tensors are not copied before."""
        m = self.m
        yield from self.standing(gradients=0.0)
        kind = m.handoff_dtype or m.dtype
        if kind == "float32":
            return
        # to quantise: the tensor, its scales spread out, and their quotient in float32
        each = 12 if kind == "fp8" else DTYPE_BYTES[kind]
        largest = -(-self._largest_published() // m.shards)
        inputs: dict[str, float | str] = {"b": each, "largest shard": largest}
        yield Term("tensor as published", each * largest, "b · largest shard", inputs)

    def _largest_published(self) -> int:
        """Return the elements of the largest published tensor: experts are published one by one."""
        matrices = [self.facts.vocab_size * self.facts.hidden_size]
        matrices += [moe.moe_intermediate_size * moe.expert_width for _, moe in self.facts.moe_layers[:1]]
        return max(matrices)

    def _loading(self) -> Iterator[Term | None]:
        """Yield the terms of loading: a rank reads its own shards into their places."""
        yield self._weights()
        yield self._padding()
        yield self._runtime()


def _real_term(value: int) -> Term:
    return Term("activations and logits", value, "most of a pass of the real model", source="measured")


def _has_indexer(layer: Layer) -> bool:
    return getattr(layer.mixer, "indexer", None) is not None


def _rotary_dim(facts: ModelFacts) -> int:
    for layer in facts.layers:
        if isinstance(layer.mixer, Mla):
            return layer.mixer.qk_rope_head_dim
        if isinstance(layer.mixer, Gqa):
            return layer.mixer.head_dim if layer.mixer.rotary else 0
    return 0


def _aligned(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
