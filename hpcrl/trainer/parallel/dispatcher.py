"""Finds the recipe's dispatcher, which sends tokens to their experts."""

from __future__ import annotations

import torch
from torch import nn

from hpcrl.config.recipe import TrainerConfig
from hpcrl.modeling.layers.deepep import DeepEPDispatcher, Exchange, MakeBuffer, find_deepep
from hpcrl.modeling.layers.moe import SparseMLP
from hpcrl.modeling.parallel.mesh import ParallelDims


def find_dispatcher(config: TrainerConfig, device: torch.device) -> MakeBuffer | None:
    """Return the buffer factory of the recipe's dispatcher; None for torch's collectives, the models' default.

    Raises
    ------
    UsageError
        The dispatcher cannot be used here.
    """
    return find_deepep(device) if config.parallelism.dispatcher == "deepep" else None


def use_dispatcher(
    model: nn.Module, mesh: ParallelDims, config: TrainerConfig, make: MakeBuffer | None, *, timeout_s: float
) -> None:
    """Let the sparse layers of a model that is distributed over ``ep`` use what `find_dispatcher` found.

    ``timeout_s`` is that of the trainer's collectives.
    """
    if make is None or mesh.ep == 1:
        return
    most = config.dispatched_tokens
    exchange = Exchange(make, mesh.get_mesh("ep").get_group(), most_tokens=most, timeout_s=timeout_s)
    for module in model.modules():
        if isinstance(module, SparseMLP):
            module.dispatcher = DeepEPDispatcher(module.gate.out_features, mesh.ep, exchange)
