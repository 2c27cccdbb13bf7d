"""Operations of a model's layers, by part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from operator import add, attrgetter

from hpcrl.models.layers import GatedDeltaNet, Gqa, Layer, Mamba2, Mla, Moe


@dataclass(frozen=True, slots=True)
class Flops:
    """Floating-point operations by part; a multiply-add is two."""

    attention_projections: float = 0.0
    """Products with the weights of every kind of mixer."""
    attention_scores: float = 0.0
    indexer: float = 0.0
    mamba: float = 0.0
    """The scan alone."""
    linear_attention: float = 0.0
    """The rule alone."""
    router: float = 0.0
    experts: float = 0.0
    shared_experts: float = 0.0
    dense_mlp: float = 0.0
    lm_head: float = 0.0

    @property
    def total(self) -> float:
        """Return the operations of all parts together."""
        return float(sum(_parts(self)))

    def __add__(self, other: Flops) -> Flops:
        return Flops(*map(add, _parts(self), _parts(other)))

    def scaled(self, factor: float) -> Flops:
        """Return the operations with every part times ``factor``."""
        return Flops(*(value * factor for value in _parts(self)))


_parts: Callable[[Flops], tuple[float, ...]] = attrgetter(*(field.name for field in fields(Flops)))


def backward_flops(flops: Flops) -> Flops:
    """Return the operations of the backward pass: twice the forward one, without an indexer's (no gradient)."""
    doubled = flops.scaled(2.0)
    return Flops(**{f.name: 0.0 if f.name == "indexer" else getattr(doubled, f.name) for f in fields(Flops)})


def layer_fixed(layer: Layer) -> Flops:
    """Return the operations of one token in ``layer`` that do not depend on its context."""
    mixer, mlp = layer.mixer, layer.mlp
    projections = 0.0 if mixer is None else float(mixer.projection_flops)
    indexer = mixer.indexer if isinstance(mixer, Mla) else None
    return Flops(
        attention_projections=projections,
        indexer=0.0 if indexer is None else float(indexer.projection_flops),
        router=float(mlp.router_flops) if isinstance(mlp, Moe) else 0.0,
        experts=float(mlp.expert_flops) if isinstance(mlp, Moe) else 0.0,
        shared_experts=float(mlp.shared_flops) if isinstance(mlp, Moe) else 0.0,
        dense_mlp=0.0 if mlp is None or isinstance(mlp, Moe) else float(mlp.flops),
    )


def layer_scores(layer: Layer, context: float, absorbed: bool) -> Flops:
    """Return the operations of one token in ``layer`` that depend on the ``context`` tokens it sees."""
    mixer = layer.mixer
    if mixer is None:
        return Flops()
    scores = mixer.score_flops(context, absorbed=absorbed)
    if isinstance(mixer, Mamba2):
        return Flops(mamba=scores)
    if isinstance(mixer, GatedDeltaNet):
        return Flops(linear_attention=scores)
    indexer = mixer.indexer if isinstance(mixer, Mla) else None
    return Flops(attention_scores=scores, indexer=0.0 if indexer is None else indexer.score_flops(context))


def sequence_scores(layer: Layer, length: int, absorbed: bool) -> Flops:
    """Return the sum over positions 1 … length. All formulas are linear in the context up to a limit."""
    mixer = layer.mixer
    limit = length if mixer is None or mixer.limit is None else min(length, mixer.limit)
    below = layer_scores(layer, (limit + 1) / 2, absorbed).scaled(limit)
    if limit == length:
        return below
    if isinstance(mixer, Gqa) and mixer.chunk is not None:
        # each chunk is a separate sequence, and the rest is the last one
        whole, rest = divmod(length, limit)
        return below.scaled(whole) + layer_scores(layer, (rest + 1) / 2, absorbed).scaled(rest)
    # beyond the limit only the indexer's part grows
    above = layer_scores(layer, (limit + 1 + length) / 2, absorbed).scaled(length - limit)
    return below + above
