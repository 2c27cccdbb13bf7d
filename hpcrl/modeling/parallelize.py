"""Sharding of a decoder over a mesh; model code sees a mesh, never a world size."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from hpcrl.modeling.mesh import ParallelDims

__all__ = ["parallelize_decoder"]


def parallelize_decoder(model: nn.Module, mesh: ParallelDims, *, dtype: torch.dtype) -> None:
    """Shard ``model`` in place with FSDP2: one group a layer and one for the rest.

    Gradients are *summed* over ranks: the loss of each rank is already divided by the tokens of the whole
    batch. Master weights, and so optimizer state and gradients after the reduction, are float32.

    Parameters
    ----------
    model:
        Whole and equal on every rank, or on ``meta``.
    mesh:
        Of the ranks; built.
    dtype:
        Of parameters and activations in forward and backward.
    """
    # inputs are not cast: rotary tables stay float32, and activations have the dtype of the weights already
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    layers = model.get_submodule("layers")
    for block in layers.children():
        fully_shard(block, mesh=mesh.sharding, mp_policy=policy)
    fully_shard(model, mesh=mesh.sharding, mp_policy=policy, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # gloo cannot pre-multiply in a reduction
            module.set_force_sum_reduction_for_comms(True)
