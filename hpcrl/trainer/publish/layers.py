"""The trainer's shards as whole layers in the layout of an engine that runs the same model code, one at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hpcrl.modeling.blocks import HeldBlock, local_block, local_part
from hpcrl.modeling.hf import CARRIED, model_tensors
from hpcrl.modeling.shared import view_of
from hpcrl.weights.handover import SharedMemory, SharedTensor

__all__ = ["ModelLayer", "fill", "find_layers"]

_ALIGNED = 64
"""Tensors begin on multiples of so many bytes."""


@dataclass
class ModelLayer:
    """What is handed over together: a layer, or the embedding, the norm or the head.

    Attributes
    ----------
    name:
        ``layers.3``, or of a module beside the layers.
    tensors:
        Where each parameter and buffer lies in the shared memory.
    provided:
        Names of those of which this rank writes its part; another rank writes the same part of the others.
    size:
        Bytes of all tensors.
    """

    name: str
    tensors: list[SharedTensor] = field(default_factory=list)
    provided: frozenset[str] = frozenset()
    size: int = 0


def find_layers(
    model: nn.Module, blocks: Sequence[Mapping[str, HeldBlock]], rank: int, dtype: torch.dtype
) -> list[ModelLayer]:
    """The layers of a sharded ``model`` in its order; equal on all ranks but for what each provides.

    Parameters
    ----------
    blocks:
        What each rank holds of each parameter and buffer.
    rank:
        This one.
    dtype:
        Of parameters in the engine; buffers have their own.
    """
    layers: dict[str, ModelLayer] = {}
    provided: dict[str, set[str]] = {}
    for number, (name, own) in enumerate(model_tensors(model).items()):
        if name.startswith(CARRIED):
            # no forward pass reads it, and so no engine that runs the same model
            continue
        parts = name.split(".")
        key = ".".join(parts[: 2 if parts[0] == "layers" else 1])
        layer = layers.setdefault(key, ModelLayer(key))
        kept = dtype if isinstance(own, nn.Parameter) else own.dtype
        offset = layer.size + -layer.size % _ALIGNED
        layer.tensors.append(SharedTensor(name, str(kept).removeprefix("torch."), tuple(own.shape), offset))
        layer.size = offset + own.numel() * kept.itemsize
        block = blocks[rank][name]
        same = [other for other, held in enumerate(blocks) if held[name] == block]
        if not block.is_empty and same[number % len(same)] == rank:
            provided.setdefault(key, set()).add(name)
    for key, layer in layers.items():
        layer.provided = frozenset(provided.get(key, ()))
    return list(layers.values())


@torch.no_grad()
def fill(layer: ModelLayer, tensors: Mapping[str, Tensor], memory: SharedMemory) -> None:
    """Write this rank's parts of a layer into shared memory, in the engine's dtype.

    Parameters
    ----------
    tensors:
        Of `hpcrl.modeling.hf.model_tensors`, on the device, sharded or not: of a sharded one what `local_block` says.
    memory:
        Where the layer lies whole, by the offsets of ``layer.tensors``. What other ranks provide is not touched.
    """
    for shared in layer.tensors:
        if shared.name not in layer.provided:
            continue
        own = tensors[shared.name]
        part = view_of(memory, shared)
        for dimension, (low, high) in enumerate(zip(*local_block(own), strict=True)):
            part = part.narrow(dimension, low, high - low)
        part.copy_(local_part(own))
