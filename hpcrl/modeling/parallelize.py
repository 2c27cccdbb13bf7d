"""Sharding of a decoder over a mesh; model code sees named dimensions, never a world size."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import pairwise
from typing import TypedDict

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.tensor import DTensor, Shard

from hpcrl.modeling.layers.dispatch import AllToAllDispatcher
from hpcrl.modeling.layers.moe import SparseMLP
from hpcrl.modeling.parallel.mesh import ParallelDims
from hpcrl.models.expert_shards import sharded_dimension


class _Settings(TypedDict):
    """Settings of every group of FSDP2."""

    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy


def parallelize_decoder(model: nn.Module, mesh: ParallelDims, *, dtype: torch.dtype, on_host: bool = False) -> None:
    """Shard ``model`` in place with FSDP2: one group a layer, one for the embedding, one for norm and head.

    Where head and embedding are one parameter, they are one group. Experts have groups of their own.

    With expert parallelism the experts of a layer are distributed over ``ep`` in equal runs, each run is sharded over
    ``efsdp``, and tokens travel to their experts.

    Gradients are *summed* over ranks: the loss of each rank is already divided by the tokens of the whole
    batch. Master weights, and so optimizer state and gradients after the reduction, are float32.

    Parameters
    ----------
    model:
        Whole and equal on every rank, or on ``meta``.
    mesh:
        Meshes of the ranks; built.
    dtype:
        Dtype of parameters and activations in forward and backward.
    on_host:
        Shards of parameters and gradients are in host memory, and come to the device to be gathered.

    Raises
    ------
    ValueError
        Its experts cannot be distributed over ``ep``, or it has none.
    """
    # inputs are not cast: rotary tables stay float32, and activations have the dtype of the weights already
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    pinned = mesh.sharding.device_type != "cpu"
    settings: _Settings = {
        "mp_policy": policy,
        "offload_policy": CPUOffloadPolicy(pin_memory=pinned) if on_host else OffloadPolicy(),
    }
    layers = list(model.get_submodule("layers").children())
    dealt_out: set[nn.Module] = set()
    if mesh.ep > 1:
        sparse = [module for module in model.modules() if isinstance(module, SparseMLP)]
        if not sparse:
            raise ValueError(f"the model has no experts to be distributed over ep {mesh.ep}")
        for mlp in sparse:
            _deal_out(mlp, mesh, settings)
            dealt_out.add(mlp.experts)
    for block in layers:
        fully_shard(block, mesh=mesh.sharding, **settings)
    embedding, norm, head = (model.get_submodule(name) for name in ("embed_tokens", "norm", "lm_head"))
    if embedding.weight is not head.weight:
        fully_shard(embedding, mesh=mesh.sharding, **settings)
        # the backward pass of an embedding needs only the tokens
        embedding.set_unshard_in_backward(False)  # type: ignore[operator]
        # wanted again at once, and free before the backward passes of layers
        fully_shard([norm, head], mesh=mesh.sharding, **settings, reshard_after_forward=False)
    fully_shard(model, mesh=mesh.sharding, **settings, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            own = mesh.expert_sharding if module in dealt_out else mesh.sharding
            # a group of one rank would divide by 1, which makes a copy
            if own.size() > 1:
                module.set_gradient_divide_factor(1.0)
            if own.size(-1) == 1:
                module.set_custom_reduce_scatter(_ReduceNothing())
            # gloo cannot pre-multiply in a reduction
            module.set_force_sum_reduction_for_comms(True)
    if mesh.ep > 1:
        _prefetch(layers)


class _ReduceNothing(ReduceScatter):
    """Reduction for FSDP2 if one rank has all of a parameter: gradients stay in their memory.

    FSDP2 allocates memory for the input of the reduction, then for the result, copies from the one to the other and
    takes parts of the result as gradients.
    """

    def __init__(self) -> None:
        # weak: a reduction that failed in between must leave nothing for the next one
        self._input: weakref.ref[Tensor] | None = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for the gradients of a group; on the next call, the same memory."""
        found = None if self._input is None else self._input()
        if found is not None:
            assert found.shape == tuple(size), "asked for something else than the result"
            self._input = None
            return found
        made = torch.empty(*size, dtype=dtype, device=device)
        self._input = weakref.ref(made)
        return made

    def __call__(self, *_: object, **__: object) -> None:
        raise AssertionError("a group of one rank has nothing to reduce")


def sum_over_copies(model: nn.Module, *, now: bool) -> None:
    """Set whether the next backward passes add up gradients over ``dp_replicate``.

    They are summed over ``fsdp`` in every backward pass. The sum over copies of the parameters is needed only at the
    end of a step: before that each copy keeps its own sums, in float32.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_all_reduce(now, recurse=False)


def _deal_out(mlp: SparseMLP, mesh: ParallelDims, settings: _Settings) -> None:
    """Leave this rank its experts of a layer, shard them over the others that have the same, and let tokens travel."""
    ep, number = mesh.get_mesh("ep"), mlp.gate.out_features
    if number % mesh.ep:
        raise ValueError(f"{number} experts cannot be distributed evenly over ep {mesh.ep}")
    here = number // mesh.ep
    for module in mlp.experts.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            own = parameter.detach().narrow(0, ep.get_local_rank() * here, here).clone()
            dealt = DTensor.from_local(own, ep, [Shard(0)], run_check=False)
            module.register_parameter(name, nn.Parameter(dealt, requires_grad=parameter.requires_grad))
    fully_shard(
        mlp.experts,
        mesh=mesh.expert_sharding,
        shard_placement_fn=lambda parameter: Shard(sharded_dimension((here, *parameter.shape[1:]), mesh.efsdp)),
        **settings,
    )
    mlp.dispatcher = AllToAllDispatcher(number, ep.get_group())


def _prefetch(layers: list[nn.Module]) -> None:
    """Gather the next layer's parameters early: the host waits in every dispatch, so FSDP2 would ask for them late."""
    groups: list[list[FSDPModule]] = [[m for m in layer.modules() if isinstance(m, FSDPModule)] for layer in layers]
    for now, following in pairwise(groups):
        now[0].set_modules_to_forward_prefetch(following)
        following[0].set_modules_to_backward_prefetch(now)
