"""Parts of a model that low-rank adapters train."""

from __future__ import annotations

from typing import Literal

from hpcrl.config.base import PositiveFloat, PositiveInt, StrictModel

LoraTarget = Literal["attention", "mlp", "shared_experts", "experts"]


class LoraConfig(StrictModel):
    """Low-rank adapters in place of the weights (docs/training.md, LoRA)."""

    rank: PositiveInt = 16
    """Rows of A and columns of B, of every adapter."""
    alpha: PositiveFloat = 32.0
    """The product of B and A counts ``alpha / rank`` times."""
    targets: list[LoraTarget] | None = None
    """Matrices that have an adapter: ``attention`` (also projections of Mamba-2 and the gated delta rule), ``mlp`` (of
    dense layers), ``shared_experts``, ``experts`` (routed ones). Routers, indexers, embeddings and the head have none.
    None: all of these that the model has."""
    experts: Literal["per_expert", "shared_outer"] = "per_expert"
    """Routed experts: ``per_expert`` gives each its own A and B; in ``shared_outer`` all experts of a layer have the A
    of gate and up in common, and the B of down. Neither depends on ``parallelism.ep``."""

    @property
    def scale(self) -> float:
        """Return the factor of the product of B and A."""
        return self.alpha / self.rank
