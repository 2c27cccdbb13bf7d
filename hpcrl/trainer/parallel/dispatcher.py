"""Which dispatcher takes tokens to their experts, as the recipe says."""

from __future__ import annotations

import torch
from torch import nn

from hpcrl.config.recipe import TrainerConfig
from hpcrl.modeling.layers.deepep import DeepEPDispatcher, Exchange, MakeBuffer, find_deepep
from hpcrl.modeling.layers.moe import SparseMLP
from hpcrl.modeling.mesh import ParallelDims

__all__ = ["find_dispatcher", "use_dispatcher"]


def find_dispatcher(config: TrainerConfig, device: torch.device) -> MakeBuffer | None:
    """What the recipe's dispatcher needs; None for torch's collectives, which models have already.

    Raises
    ------
    UsageError
        It cannot be used here.
    """
    return find_deepep(device) if config.parallelism.dispatcher == "deepep" else None


def use_dispatcher(model: nn.Module, mesh: ParallelDims, config: TrainerConfig, make: MakeBuffer | None) -> None:
    """Let the sparse layers of a model that is dealt out over ``ep`` use what `find_dispatcher` found."""
    if make is None or mesh.ep == 1:
        return
    # chunks near heads and tails are of unequal length, and what fills up comes on top
    share = -(-config.micro_batch_tokens // mesh.cp)
    most = (2 * share if config.parallelism.cp_scheme != "ulysses" and mesh.cp > 1 else share) + 2 * mesh.cp
    exchange = Exchange(make, mesh.get_mesh("ep").get_group(), most_tokens=most)
    for module in model.modules():
        if isinstance(module, SparseMLP):
            module.dispatcher = DeepEPDispatcher(module.gate.out_features, mesh.ep, exchange)
