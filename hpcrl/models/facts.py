"""Architecture facts of a model: tensors, parameters, cache bytes and operations, from its ``config.json`` alone.

No torch, no network: usable on a login node. `load_facts` takes a model directory, a ``config.json`` or the name of
a known model. Nothing here says how a model is run; `hpcrl.planning` does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from types import MappingProxyType
from typing import Literal

from hpcrl.models.flops import Flops, backward_flops, layer_fixed, layer_scores, sequence_scores
from hpcrl.models.layers import GatedDeltaNet, Gqa, Layer, Mamba2, Mla, Moe
from hpcrl.models.tensors import DTYPE_BYTES, Part, TensorSpec, Weight, mxfp4_bytes, scale_shape

AttentionKind = Literal["gqa", "gqa+window", "gqa+chunk", "mla", "mla+dsa", "mamba2", "gated_delta_net", "none"]
"""Kinds of token mixers of a layer."""


@dataclass(frozen=True, slots=True)
class Naming:
    """Names of the tensors outside of layers, and the prefix of layers."""

    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    layers: str = "model.layers"
    mtp_layers: str | None = None
    """Prefix of the modules of multi-token prediction; None: they count on after the last layer."""
    lm_head: str = "lm_head.weight"


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Sizes of a model, and quantities that follow from them.

    Attributes
    ----------
    name:
        For people: the known name, or the directory.
    model_type:
        Value of ``config.json``.
    dtype:
        Dtype of the published weights.
    layers:
        The decoder layers.
    mtp_layers:
        Modules of multi-token prediction. Published totals often leave them out, and so does every method here
        unless ``mtp=True``.
    mtp_outer:
        Tensors of these modules outside their layers, by full names.
    stored:
        Storage of matrices in the model's files, by its configuration: in ``dtype``, in block FP8, or experts in MXFP4.
    """

    name: str
    model_type: str
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    layers: tuple[Layer, ...]
    mtp_layers: tuple[Layer, ...] = ()
    mtp_outer: tuple[Weight, ...] = ()
    dtype: str = "bfloat16"
    naming: Naming = Naming()
    stored: Literal["dtype", "fp8", "mxfp4"] = "dtype"

    def __hash__(self) -> int:
        # facts are keys of caches, and hashing hundreds of layers anew each time would cost more than the caches save
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.model_type, self.layers, self.mtp_layers, self.vocab_size, self.dtype))

    # -- tensors ------------------------------------------------------------------------------------------------

    def tensors(self, *, mtp: bool = False, fp8: bool = False) -> Iterator[TensorSpec]:
        """Yield every tensor of a published checkpoint by its Hugging Face name.

        Parameters
        ----------
        mtp:
            With the modules of multi-token prediction.
        fp8:
            DeepSeek's block format: matrices of layers in ``float8_e4m3fn``, each with a float32 ``*_scale_inv``. They
            are those that engines multiply in FP8. Some published checkpoints have an indexer's keys (``wk``) in FP8
            too; vLLM brings them back to bfloat16, and they are not among them.
        """
        for weight, prefix, layer in self.placed(mtp=mtp):
            for expert in range(weight.copies):
                name = prefix + (
                    weight.name.format(expert) if weight.copies > 1 or "{}" in weight.name else weight.name
                )
                quantised = fp8 and weight.quantised
                spec_dtype = "float8_e4m3fn" if quantised else weight.dtype or self.dtype
                number = expert if "{}" in weight.name else None
                yield TensorSpec(name, weight.shape, spec_dtype, weight.part, layer, number, weight.tp_dim)
                if quantised:
                    scale = f"{name}_scale_inv"
                    shape = scale_shape(weight.shape)
                    yield TensorSpec(scale, shape, "float32", weight.part, layer, number, weight.tp_dim, is_scale=True)

    def placed(self, *, mtp: bool) -> Iterator[tuple[Weight, str, int | None]]:
        """Yield the weights with the prefix of their names and their layer: those of all experts at once."""
        shape = (self.vocab_size, self.hidden_size)
        yield Weight(self.naming.embedding, shape, Part.EMBEDDING, tp_dim=0), "", None
        for index, layer in enumerate(self.layers):
            for weight in layer.weights:
                yield weight, f"{self.naming.layers}.{index}.", index
        yield Weight(self.naming.final_norm, (self.hidden_size,), Part.NORM), "", None
        if not self.tie_word_embeddings:
            yield Weight(self.naming.lm_head, shape, Part.LM_HEAD, tp_dim=0), "", None
        if mtp:
            for weight in self.mtp_outer:
                yield weight, "", len(self.layers)
            for i, layer in enumerate(self.mtp_layers):
                own = self.naming.mtp_layers
                number = len(self.layers) + i
                prefix = f"{own}.{i}." if own is not None else f"{self.naming.layers}.{number}."
                for weight in layer.weights:
                    yield weight, prefix, number

    # -- parameters ---------------------------------------------------------------------------------------------

    def num_parameters(self, *, mtp: bool = False) -> int:
        """Return the number of parameters of the published checkpoint (tied embeddings once, with router biases)."""
        return sum(self.parameters_by_part(mtp=mtp).values())

    def active_parameters(self, *, embedding: bool = True, lm_head: bool = True) -> int:
        """Return the number of parameters that a token's forward pass reads: all but the experts it does not visit.

        Parameters
        ----------
        embedding, lm_head:
            Count them, whole. Model cards differ: most count both, gpt-oss's the head alone. One matrix that is both
            (tied) counts as the head.
        """
        parts = self.parameters_by_part()
        skipped = sum((moe.num_experts - moe.num_experts_per_tok) * moe.expert_parameters for _, moe in self.moe_layers)
        if self.tie_word_embeddings:
            left_out = 0 if lm_head else parts[Part.EMBEDDING]
        else:
            left_out = (not embedding) * parts[Part.EMBEDDING] + (not lm_head) * parts[Part.LM_HEAD]
        return self.num_parameters() - skipped - left_out

    def parameters_by_part(self, *, mtp: bool = False) -> Mapping[Part, int]:
        """Return the number of parameters of each part; those of multi-token prediction are all in `Part.MTP`."""
        return _parameters_by_part(self, mtp)

    def layer_parameters(self, index: int) -> Mapping[Part, int]:
        """Return the number of parameters of one decoder layer by part."""
        return _layer_parameters(self, index)

    def weight_bytes(self, dtype: str | None = None, *, fp8: bool = False) -> Mapping[Part, int]:
        """Return the stored bytes of the model by part, FP8 scales included, without multi-token prediction."""
        return _weight_bytes(self, dtype or self.dtype, fp8)

    @cached_property
    def stored_bytes(self) -> int:
        """Return the bytes of the model's own files, without multi-token prediction, that a start of a run reads."""
        if self.stored != "mxfp4":
            return sum(self.weight_bytes(fp8=self.stored == "fp8").values())
        return sum(
            mxfp4_bytes(weight.shape)
            if weight.quantised and weight.part is Part.EXPERT
            else weight_bytes(weight, self.dtype, fp8=False)
            for weight, _, _ in self.placed(mtp=False)
        )

    # -- kinds of layers ----------------------------------------------------------------------------------------

    @cached_property
    def alike(self) -> tuple[int, ...]:
        """Return for each layer the number of the first equal layer: results for one hold for all of them."""
        first: dict[Layer, int] = {}
        return tuple(first.setdefault(layer, index) for index, layer in enumerate(self.layers))

    @cached_property
    def distinct_layers(self) -> tuple[tuple[Layer, int], ...]:
        """Return the distinct layers in their order, each with its number of occurrences."""
        return tuple((self.layers[index], count) for index, count in Counter(self.alike).items())

    @cached_property
    def attention_kinds(self) -> tuple[AttentionKind, ...]:
        """Return the kind of the mixer of each layer."""
        return tuple(_attention_kind(layer) for layer in self.layers)

    @cached_property
    def moe_layers(self) -> tuple[tuple[int, Moe], ...]:
        """Return the number and experts of each sparse layer."""
        return tuple((i, layer.mlp) for i, layer in enumerate(self.layers) if isinstance(layer.mlp, Moe))

    @property
    def num_experts(self) -> int:
        """Return the number of routed experts of a sparse layer; 0 where there is none."""
        return self.moe_layers[0][1].num_experts if self.moe_layers else 0

    @property
    def num_experts_per_tok(self) -> int:
        """Return the number of experts that a token visits in a sparse layer; 0 where there is none."""
        return self.moe_layers[0][1].num_experts_per_tok if self.moe_layers else 0

    # -- cache --------------------------------------------------------------------------------------------------

    def kv_bytes_per_token(self, dtype: str = "bfloat16") -> int:
        """Return the bytes of KV cache that a token adds over all layers.

        ``dtype`` is float32, bfloat16, float16 or fp8 (ValueError else).

        Layers with a window or with chunks keep a limited number of tokens of a sequence: ``kept_tokens`` of the mixer.
        """
        return sum(layer.mixer.kv_bytes_per_token(dtype) for layer in self.layers if layer.mixer is not None)

    def state_bytes_per_sequence(self, dtype: str = "bfloat16") -> int:
        """Return the bytes of recurrent state of a sequence, whatever its length."""
        return sum(layer.mixer.state_bytes_per_sequence(dtype) for layer in self.layers if layer.mixer is not None)

    # -- operations ---------------------------------------------------------------------------------------------

    @cached_property
    def fixed_flops(self) -> tuple[Flops, ...]:
        """Return the operations a token of each of `distinct_layers` that do not depend on what it sees."""
        return tuple(layer_fixed(layer) for layer, _ in self.distinct_layers)

    def flops_per_token(self, context: float, *, absorbed: bool = False) -> Flops:
        """Return the operations of a forward pass for one token that sees ``context`` tokens, itself included.

        Parameters
        ----------
        context:
            Tokens in sight; the mean over a sequence of length ``S`` is ``(S + 1) / 2`` (see `sequence_flops` for
            attention with a limit).
        absorbed:
            Latent attention as decode and sparse kernels compute it.
        """
        return _flops(self, float(context), absorbed)

    def sequence_flops(self, length: int, *, backward: bool = False, absorbed: bool = False) -> Flops:
        """Return the operations for all tokens of a causal sequence of ``length``, summed exactly over positions.

        Parameters
        ----------
        backward:
            The backward pass instead: twice the forward one. The indexer has no gradient.
        absorbed:
            As in `flops_per_token`.
        """
        flops = _sequence_flops(self, length, absorbed)
        return backward_flops(flops) if backward else flops


def weight_bytes(weight: Weight, dtype: str, *, fp8: bool) -> int:
    """Return the stored bytes of a weight and its copies.

    Parameters
    ----------
    dtype:
        Dtype of weights for which the model does not set their own.
    fp8:
        Whether quantised matrices take a byte a number, and four for the scale of each block of 128 x 128.
    """
    if fp8 and weight.quantised:
        return weight.elements + 4 * prod(scale_shape(weight.shape)) * weight.copies
    return weight.elements * DTYPE_BYTES[weight.dtype or dtype]


def _attention_kind(layer: Layer) -> AttentionKind:
    match layer.mixer:
        case None:
            return "none"
        case Mla(topk=topk):
            return "mla" if topk is None else "mla+dsa"
        case Mamba2():
            return "mamba2"
        case GatedDeltaNet():
            return "gated_delta_net"
        case Gqa(window=window, chunk=chunk):
            return "gqa+chunk" if chunk is not None else "gqa" if window is None else "gqa+window"


@lru_cache(maxsize=64)
def _parameters_by_part(facts: ModelFacts, mtp: bool) -> Mapping[Part, int]:
    total: dict[Part, int] = {}
    for weight, _, layer in facts.placed(mtp=mtp):
        part = Part.MTP if layer is not None and layer >= len(facts.layers) else weight.part
        total[part] = total.get(part, 0) + weight.elements
    return MappingProxyType(total)


@lru_cache(maxsize=64)
def _weight_bytes(facts: ModelFacts, dtype: str, fp8: bool) -> Mapping[Part, int]:
    total: dict[Part, int] = {}
    for weight, _, _ in facts.placed(mtp=False):
        total[weight.part] = total.get(weight.part, 0) + weight_bytes(weight, dtype, fp8=fp8)
    return MappingProxyType(total)


@lru_cache(maxsize=4096)
def _layer_parameters(facts: ModelFacts, index: int) -> Mapping[Part, int]:
    total: dict[Part, int] = {}
    for weight in facts.layers[index].weights:
        total[weight.part] = total.get(weight.part, 0) + weight.elements
    return MappingProxyType(total)


@lru_cache(maxsize=4096)
def _flops(facts: ModelFacts, context: float, absorbed: bool) -> Flops:
    return _sum_flops(facts, lambda layer: layer_scores(layer, context, absorbed), tokens=1)


@lru_cache(maxsize=4096)
def _sequence_flops(facts: ModelFacts, length: int, absorbed: bool) -> Flops:
    return _sum_flops(facts, lambda layer: sequence_scores(layer, length, absorbed), tokens=length)


def _sum_flops(facts: ModelFacts, scores: Callable[[Layer], Flops], *, tokens: int) -> Flops:
    """Return the parts that do not depend on the context times ``tokens``, plus ``scores`` of each layer."""
    fixed = Flops(lm_head=2.0 * facts.vocab_size * facts.hidden_size)
    total = Flops()
    for (layer, count), each in zip(facts.distinct_layers, facts.fixed_flops, strict=True):
        total += (each.scaled(tokens) + scores(layer)).scaled(count)
    return total + fixed.scaled(tokens)
