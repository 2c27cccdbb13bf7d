"""Families of which each layer has experts, and no other feed-forward."""

from __future__ import annotations

from dataclasses import dataclass

from hpcrl.models.arch.base import GroupedQueryArch


@dataclass(frozen=True, kw_only=True)
class ExpertLayersArch(GroupedQueryArch):
    """Grouped queries, and experts in every layer; ``intermediate_size`` is the width of one."""

    intermediate_size: int
    num_local_experts: int
    num_experts_per_tok: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.num_experts_per_tok <= self.num_local_experts:
            raise ValueError(
                f"num_experts_per_tok ({self.num_experts_per_tok}) must be between 1 and "
                f"num_local_experts ({self.num_local_experts})"
            )

    @property
    def routed_experts(self) -> int:
        return self.num_local_experts

    @property
    def experts_per_token(self) -> int:
        return self.num_experts_per_tok

    def is_sparse(self, layer: int) -> bool:
        return True
