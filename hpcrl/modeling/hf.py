"""The map between our parameters and the tensors of a published Hugging Face model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from hpcrl.models.arch import ModelArch

__all__ = ["load_hf_tensors", "to_hf_tensors"]


def to_hf_tensors(name: str, tensor: Tensor, arch: ModelArch) -> Iterator[tuple[str, Tensor]]:
    """The published tensors that the parameter ``name`` of `Qwen3Moe` becomes, as views of ``tensor``.

    A tied ``lm_head`` becomes nothing: published models with tied embeddings carry one copy.
    """
    if name == "lm_head.weight":
        if not arch.tie_word_embeddings:
            yield name, tensor
    elif name.endswith("experts.gate_up_proj"):
        prefix = "model." + name.removesuffix(".gate_up_proj")
        half = arch.moe_intermediate_size
        for e in range(arch.num_experts):
            yield f"{prefix}.{e}.gate_proj.weight", tensor[e, :half]
            yield f"{prefix}.{e}.up_proj.weight", tensor[e, half:]
    elif name.endswith("experts.down_proj"):
        prefix = "model." + name.removesuffix(".down_proj")
        for e in range(arch.num_experts):
            yield f"{prefix}.{e}.down_proj.weight", tensor[e]
    else:
        yield f"model.{name}", tensor


@torch.no_grad()
def load_hf_tensors(model: nn.Module, arch: ModelArch, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy published tensors into ``model`` in place, whole (unsharded) parameters only.

    Raises
    ------
    ValueError
        A tensor is unknown, has the wrong shape, comes twice, or is missing. The model may be half
        written then: callers load into a spare copy or stop.
    """
    targets: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=True):
        targets.update(to_hf_tensors(name, parameter, arch))
    missing = set(targets)
    for name, tensor in tensors:
        target = targets.get(name)
        if target is None:
            raise ValueError(f"tensor {name!r} is not part of this model")
        if target.shape != tensor.shape:
            raise ValueError(f"tensor {name!r} has shape {tuple(tensor.shape)}, not {tuple(target.shape)}")
        if name not in missing:
            raise ValueError(f"tensor {name!r} comes twice")
        missing.discard(name)
        target.copy_(tensor)
    if missing:
        raise ValueError(f"{len(missing)} tensors are missing, the first is {min(missing)!r}")
