"""The trainer's shards as whole layers in the layout of an engine that runs the same model code, one at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hpcrl.modeling.blocks import HeldBlock, local_block, local_part
from hpcrl.modeling.hf import CARRIED, model_tensors
from hpcrl.modeling.memory.shared import view_of
from hpcrl.weights.handover import SharedMemory, SharedTensor

_ALIGNED = 64
"""Alignment of tensors in bytes."""


@dataclass
class ModelLayer:
    """Unit of a transfer: a layer, or the embedding, the norm or the head.

    Attributes
    ----------
    name:
        ``layers.3``, or the name of a module outside of the layers.
    tensors:
        Location of each parameter and buffer in the shared memory.
    provided:
        Names of those whose part this rank writes; another rank writes the same part of the others.
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
    """Return the layers of a sharded ``model`` in its order; equal on all ranks except for ``provided``.

    Parameters
    ----------
    blocks:
        For each rank, its block of each parameter and buffer.
    rank:
        Number of this rank.
    dtype:
        Dtype of parameters in the engine; buffers keep their own.
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
        Result of `hpcrl.modeling.hf.model_tensors`, on the device; of a sharded tensor, its `local_block` is written.
    memory:
        Memory of the whole layer, by the offsets of ``layer.tensors``. Parts of other ranks are not touched.
    """
    for shared in layer.tensors:
        if shared.name not in layer.provided:
            continue
        own = tensors[shared.name]
        part = view_of(memory, shared)
        for dimension, (low, high) in enumerate(zip(*local_block(own), strict=True)):
            part = part.narrow(dimension, low, high - low)
        part.copy_(local_part(own))
