"""Low-rank adapters (LoRA, Hu et al. 2021) of a decoder: linear layers and experts compute ``W x + s · B (A x)``.

The model's own parameters keep their names and positions. Adapters are additional parameters:
``layers.0.self_attn.q_proj.lora_A`` ``[r, in]`` and ``lora_B`` ``[out, r]``; of experts, which lie in one tensor,
``layers.0.mlp.experts.adapters.gate_up_proj.lora_A`` ``[E, r, in]`` and ``lora_B`` ``[E, out, r]``, so that expert
parallelism deals them out with their experts. What all experts of a layer have in common is
``layers.0.mlp.outer.gate_up_proj.lora_A`` ``[r, in]`` and ``layers.0.mlp.outer.down_proj.lora_B`` ``[out, r]``: on
every rank, whatever the degree of expert parallelism, with the sum of the gradients of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple

import torch
import xxhash
from torch import Tensor, nn

from hpcrl.errors import UsageError
from hpcrl.modeling.blocks import local_block, local_part
from hpcrl.modeling.decoder import Decoder
from hpcrl.modeling.hf import HfAdapter, Region, adapter_parameters
from hpcrl.modeling.layers.attention import GroupedQueryAttention
from hpcrl.modeling.layers.delta_net import GatedDeltaMixer
from hpcrl.modeling.layers.mamba import Mamba2
from hpcrl.modeling.layers.mla import LatentAttention
from hpcrl.modeling.layers.mlp import GatedMLP, SquaredMLP
from hpcrl.modeling.layers.moe import Experts, SparseMLP, SquaredExperts
from hpcrl.modeling.low_rank import AdaptedLinear, GroupedAdapter
from hpcrl.models.adapting import TARGET_PARTS, AdapterSettings, lora_problems

_PREFIX = "base_model.model."
"""Prefix of the published name of an adapted module, as PEFT writes it."""


def adapt(model: Decoder, config: AdapterSettings) -> None:
    """Give ``model``, which is not sharded yet, the adapters of ``config``; nothing else of it is trained any more.

    Raises
    ------
    UsageError
        The model has not what ``config`` asks for.
    """
    problems = list(lora_problems(model.arch.facts, config.targets))
    if problems:
        hint = "name targets that it has, or leave trainer.lora.targets out for all of them"
        raise UsageError(f"trainer.lora.targets: {'; '.join(problems)}\n    hint: {hint}")
    model.requires_grad_(requires_grad=False)
    wanted = TARGET_PARTS if config.targets is None else config.targets
    for parent in list(model.modules()):
        if isinstance(parent, SparseMLP):
            _adapt_sparse(parent, config)
        elif _target_of(model, parent) in wanted:
            _adapt_linears(parent, config)


def _target_of(model: Decoder, parent: nn.Module) -> str | None:
    """Return the name of a module's linear layers in ``trainer.lora.targets``; None for sparse and other layers."""
    if isinstance(parent, GroupedQueryAttention | LatentAttention | Mamba2 | GatedDeltaMixer):
        return "attention"
    return "mlp" if isinstance(parent, GatedMLP | SquaredMLP) and not _is_shared(model, parent) else None


def _is_shared(model: Decoder, mlp: nn.Module) -> bool:
    return any(isinstance(module, SparseMLP) and module.shared_experts is mlp for module in model.modules())


def _adapt_linears(parent: nn.Module, config: AdapterSettings) -> None:
    """Adapt the linear layers that are children of ``parent``: an indexer and a router are modules of their own."""
    for name, child in list(parent.named_children()):
        if type(child) is nn.Linear:
            setattr(parent, name, AdaptedLinear.of(child, config.rank, config.scale))


def _adapt_sparse(mlp: SparseMLP, config: AdapterSettings) -> None:
    wanted = TARGET_PARTS if config.targets is None else config.targets
    if "shared_experts" in wanted:
        _adapt_linears(mlp, config)
        if mlp.shared_experts is not None:
            _adapt_linears(mlp.shared_experts, config)
    experts = mlp.experts
    if "experts" not in wanted or not isinstance(experts, Experts | SquaredExperts):
        return
    shared = config.experts == "shared_outer"
    for name, matrix in list(experts.named_parameters(recurse=False)):
        outer: Literal["lora_A", "lora_B"] | None = None
        if shared:
            outer = "lora_B" if name == "down_proj" else "lora_A"
        made = GroupedAdapter(matrix, config.rank, config.scale, outer=outer)
        experts.adapters[name] = made
        if made.outer is not None:
            # with the layer, not with the experts: these are cut another way
            mlp.outer[name] = made.outer.holder


class Adapted(NamedTuple):
    """A matrix with an adapter, or the matrices of all experts of a layer.

    Attributes
    ----------
    base, a, b:
        Names of the model's own parameter, and of the two of the adapter.
    scale:
        Factor of their product.
    """

    base: str
    a: str
    b: str
    scale: float


def adapted_matrices(model: nn.Module) -> Iterator[Adapted]:
    """Return all matrices that have an adapter, in the order of modules."""
    for name, module in model.named_modules():
        if isinstance(module, AdaptedLinear):
            yield Adapted(f"{name}.weight", f"{name}.lora_A", f"{name}.lora_B", module.scale)
        elif isinstance(module, GroupedAdapter):
            experts, _, matrix = name.partition(".adapters.")
            mlp = experts.rpartition(".")[0]
            outer = None if module.outer is None else module.outer.name
            a, b = (f"{mlp}.outer.{matrix}.{own}" if own == outer else f"{name}.{own}" for own in ("lora_A", "lora_B"))
            yield Adapted(f"{experts}.{matrix}", a, b, module.scale)


@torch.no_grad()
def init_adapters(model: nn.Module, seed: int) -> None:
    """Begin: A uniform within ``1 / sqrt(in)`` of zero, as PEFT draws it; B zero, so that nothing is changed.

    A of each matrix has random numbers of its own, which follow from its name and ``seed`` alone: they are the same on
    every mesh. A rank draws those of its experts, and no others.
    """
    parameters = dict(model.named_parameters())
    for adapted in adapted_matrices(model):
        local_part(parameters[adapted.b]).zero_()
        whole, local = parameters[adapted.a], local_part(parameters[adapted.a])
        low, high = local_block(whole)
        if local.numel() == 0:
            continue
        part = tuple(slice(first, last) for first, last in zip(low[-2:], high[-2:], strict=True))
        for index in range(low[0], high[0]) if whole.dim() == 3 else (None,):
            target = local if index is None else local[index - low[0]]
            target.copy_(_draw(f"{seed} {adapted.a} {index}", whole.shape[-2:])[part])


def _draw(what: str, shape: Sequence[int]) -> Tensor:
    generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(what) >> 1)
    bound = shape[-1] ** -0.5
    return torch.empty(*shape).uniform_(-bound, bound, generator=generator)


@contextmanager
def use_adapters(model: nn.Module, how: Literal["off", "merged"]) -> Iterator[None]:
    """Compute without adapters inside, or with their products added to the weights and rounded as engines do it."""
    adapters = [module for module in model.modules() if isinstance(module, AdaptedLinear | GroupedAdapter)]
    for module in adapters:
        module.mode = how
    try:
        yield
    finally:
        for module in adapters:
            module.mode = "apart"


class AdapterNames(HfAdapter):
    """Names of adapters as PEFT and vLLM have them, a pair of matrices for each published matrix of the model.

    What several published matrices have in common (the A of gate and up, and of all experts) is published for each.
    """

    def __init__(self, model: Decoder) -> None:
        """Collect the adapted matrices of ``model``, sharded or not."""
        super().__init__(model.arch)
        parameters = dict(model.named_parameters())
        self._regions: dict[str, list[Region]] = {}
        self.modules: list[str] = []
        for adapted in adapted_matrices(model):
            published = model.adapter.regions(adapted.base, parameters[adapted.base].shape)
            self.modules += [region.name.removesuffix(".weight") for region in published]
            for own, letter in ((adapted.a, "A"), (adapted.b, "B")):
                shape = tuple(parameters[own].shape)
                found = self._regions.setdefault(own, [])
                found += [_region_of(region, shape, letter) for region in published]

    @property
    def tensors(self) -> Callable[[nn.Module], dict[str, Tensor]]:
        """See `HfAdapter`: the parameters of adapters alone."""
        return adapter_parameters

    def regions(self, name: str, shape: Sequence[int]) -> list[Region]:
        """See `HfAdapter`; of an adapter's parameter."""
        return self._regions[name]


def _region_of(published: Region, shape: tuple[int, ...], letter: str) -> Region:
    """Return the region of the A or B of a published matrix in the parameter of ``shape``."""
    name = f"{_PREFIX}{published.name.removesuffix('.weight')}.lora_{letter}.weight"
    expert = published.low[:-2] if len(shape) == 3 else ()
    if letter == "A":
        return Region(name, (*expert, 0, 0), shape[-2:])
    return Region(name, (*expert, published.low[-2], 0), (published.shape[0], shape[-1]))
