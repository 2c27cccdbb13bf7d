"""Kinds of layers and what each costs: weights, cache and state of a sequence, floating-point operations.

A multiply-add counts as two operations. ``context`` is the number of tokens that come before one query token in its
sequence, itself included; what a window, a chunk or sparse attention keeps out of sight, each mixer knows itself.
Sources of formulas: docs/planning.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcrl.models.layers.attention import Gqa, Indexer, Mla
from hpcrl.models.layers.mlp import DenseMlp, ExpertNames, Moe
from hpcrl.models.layers.recurrent import GatedDeltaNet, Mamba2
from hpcrl.models.tensors import Weight

__all__ = [
    "DenseMlp",
    "ExpertNames",
    "GatedDeltaNet",
    "Gqa",
    "Indexer",
    "Layer",
    "Mamba2",
    "Mixer",
    "Mla",
    "Mlp",
    "Moe",
]

Mixer = Gqa | Mla | Mamba2 | GatedDeltaNet
Mlp = DenseMlp | Moe


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A decoder layer: a mixer, a feed-forward block, or (hybrids) only one of the two."""

    mixer: Mixer | None
    mlp: Mlp | None
    mixer_prefix: str = "self_attn."
    mlp_prefix: str = "mlp."
    extra: tuple[Weight, ...] = ()
    """Norms, and what a multi-token-prediction module has around its layer."""

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Return all weights by their names in the layer."""
        parts = ((self.mixer_prefix, self.mixer), (self.mlp_prefix, self.mlp))
        own = (
            Weight(prefix + w.name, w.shape, w.part, w.tp_dim, w.dtype, w.quantised, w.copies, w.trained)
            for prefix, module in parts
            if module is not None
            for w in module.weights
        )
        return (*self.extra, *own)
