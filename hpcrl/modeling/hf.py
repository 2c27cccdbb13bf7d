"""The map between hpcrl's parameters and the tensors of a published Hugging Face model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from hpcrl.models.arch import ModelArch
from hpcrl.models.mtp import is_mtp_tensor
from hpcrl.weights.read.stored_weights import EMBEDDING, HEAD, heads_differ_problem

CARRIED = "carried."
"""Prefix of published names of tensors that no forward pass reads (`hpcrl.modeling.checkpoint_io.carried`)."""


_TWINS = {EMBEDDING: HEAD, HEAD: EMBEDDING}


class Region(NamedTuple):
    """Location of a published tensor in a tensor of the model.

    Attributes
    ----------
    name:
        Published name.
    low:
        First index in the model's tensor.
    shape:
        Shape of the published tensor, which is that of the region without the leading dimensions in which it has one
        element (the number of an expert).
    """

    name: str
    low: tuple[int, ...]
    shape: tuple[int, ...]


class HfAdapter:
    """Names of families whose published experts have tensors of their own, ``experts.7.gate_proj.weight`` and so on."""

    FUSED: ClassVar[bool] = False
    """Whether published experts of a layer are stored in one tensor, with the same layout as here."""

    def __init__(self, arch: ModelArch) -> None:
        self.arch = arch

    @property
    def tensors(self) -> Callable[[nn.Module], dict[str, Tensor]]:
        """Return a function that takes a model and returns the tensors that this map names, by the model's names."""
        return model_tensors

    def regions(self, name: str, shape: Sequence[int]) -> list[Region]:
        """Return the published tensors that the model's tensor ``name`` of ``shape`` is split into.

        A tied ``lm_head`` has none: published models with tied embeddings contain one copy.
        """
        shape = tuple(shape)
        if name.startswith(CARRIED):
            return [Region(name.removeprefix(CARRIED), (0,) * len(shape), shape)]
        if name == "lm_head.weight":
            return [] if self.arch.tie_word_embeddings else [Region(name, (0, 0), shape)]
        prefix, _, leaf = name.rpartition(".")
        apart = prefix.endswith(".experts") and not self.FUSED
        if apart and leaf == "gate_up_proj":
            experts, both, width = shape
            half = both // 2
            return [
                Region(f"model.{prefix}.{expert}.{own}.weight", (expert, row, 0), (half, width))
                for expert in range(experts)
                for own, row in (("gate_proj", 0), ("up_proj", half))
            ]
        if apart and leaf in {"up_proj", "down_proj"}:
            return [
                Region(f"model.{prefix}.{expert}.{leaf}.weight", (expert, 0, 0), shape[1:])
                for expert in range(shape[0])
            ]
        return [Region(f"model.{name}", (0,) * len(shape), shape)]

    def to_hf(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the published tensors as views of ``tensor``, each with its name, in the shape of its `Region`.

        Raises
        ------
        IndexError
            ``tensor`` has too few elements.
        """
        for region in self.regions(name, tensor.shape):
            leading = tensor.dim() - len(region.shape)
            view = tensor[region.low[:leading]]
            for dim, (low, size) in enumerate(zip(region.low[leading:], region.shape, strict=True)):
                view = view.narrow(dim, low, size)
            yield region.name, view

    def is_mtp(self, name: str) -> bool:
        """Return whether the published tensor ``name`` belongs to a module of multi-token prediction.

        hpcrl never runs these modules.
        """
        return is_mtp_tensor(name, layers=self.arch.num_hidden_layers, modules=self.arch.num_nextn_predict_layers)

    def is_redundant(self, name: str) -> bool:
        """Return whether the published tensor ``name`` follows from other data.

        Older models have the frequencies of rotary embeddings, which follow from ``config.json``. A head that is tied
        to the embedding is not included: its values decide whether it is a copy (`tied_twin`).
        """
        return name.endswith("rotary_emb.inv_freq")

    def tied_twin(self, name: str) -> str | None:
        """Return the other published name of the tensor ``name`` where head and embedding are one; else None."""
        return _TWINS.get(name) if self.arch.tie_word_embeddings else None


class RenamedTensors(HfAdapter):
    """Names of a family that has other words for some modules."""

    NAMES: ClassVar[Mapping[str, str]]
    """Published parts of names by those of `HfAdapter`, replaced in this order."""

    def regions(self, name: str, shape: Sequence[int]) -> list[Region]:
        regions = super().regions(name, shape)
        if name.startswith(CARRIED):
            return regions
        return [region._replace(name=self._renamed(region.name)) for region in regions]

    def _renamed(self, name: str) -> str:
        for ours, theirs in self.NAMES.items():
            name = name.replace(ours, theirs)
        return name


def adapter_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of low-rank adapters (`hpcrl.modeling.adapters`) by name, sharded ones as they are.

    The result is empty if ``model`` has none.
    """
    return {name: own for name, own in model.named_parameters() if _is_adapter(name)}


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the own tensors of ``model``: parameters (tied ones once), then buffers, without adapters.

    By the model's own names, in the order of modules; sharded ones as they are.
    """
    own = {name: own for name, own in model.named_parameters() if not _is_adapter(name)}
    return {**own, **dict(model.named_buffers())}


def _is_adapter(name: str) -> bool:
    return name.endswith((".lora_A", ".lora_B"))


def published_tensors(model: nn.Module, adapter: HfAdapter) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a whole (unsharded) ``model`` by published names, as detached views in published shapes."""
    for name, tensor in model_tensors(model).items():
        yield from adapter.to_hf(name, tensor.detach())


@torch.no_grad()
def load_hf_tensors(model: nn.Module, adapter: HfAdapter, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy published tensors into ``model`` in place, whole (unsharded) parameters only.

    Tensors of multi-token prediction that ``model`` does not carry are left out. A head that is tied to the embedding
    may come by either name, or by both with the same values.

    Raises
    ------
    ValueError
        A tensor is unknown, has the wrong shape, comes twice, or is missing; head and embedding are tied and come
        with different values. The model may be half written then: callers load into a spare copy or stop.
    """
    targets = dict(published_tensors(model, adapter))
    missing, came = set(targets), set[str]()
    for given, tensor in tensors:
        twin = adapter.tied_twin(given)
        name = twin if twin is not None and given not in targets else given
        target = targets.get(name)
        if target is None:
            if adapter.is_redundant(name) or adapter.is_mtp(name):
                continue
            raise ValueError(f"tensor {name!r} is not part of this model")
        if target.shape != tensor.shape:
            raise ValueError(f"tensor {given!r} has shape {tuple(tensor.shape)}, not {tuple(target.shape)}")
        if given in came:
            raise ValueError(f"tensor {given!r} comes twice")
        came.add(given)
        if name not in missing:
            # the other name of a tied tensor came before
            if not torch.equal(target, tensor.to(target)):
                raise ValueError(heads_differ_problem())
            continue
        missing.discard(name)
        target.copy_(tensor)
    if missing:
        raise ValueError(f"{len(missing)} tensors are missing, the first is {min(missing)!r}")
