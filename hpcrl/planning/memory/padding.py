"""Parameters that FSDP2 adds so that all ranks hold equal parts of a tensor.

FSDP2 cuts a tensor along one dimension (``torch/distributed/fsdp/_fully_shard/_fsdp_param.py``): every rank allocates
``ceil(size / ranks)`` of it, also where the last ranks have less or nothing of the tensor itself. What is gathered and
what is reduced has that size times the ranks. `hpcrl.modeling.parallelize` cuts dense tensors along their rows, and
experts along the experts or, where these do not divide evenly, along another dimension
(`hpcrl.models.expert_shards`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from hpcrl.models.expert_shards import sharded_dimension
from hpcrl.models.facts import ModelFacts
from hpcrl.models.layers import Moe
from hpcrl.models.tensors import Part, Weight


@dataclass(frozen=True, slots=True)
class Padding:
    """Padding elements of some tensors, in addition to their parameters.

    Attributes
    ----------
    held:
        On all ranks of one copy of the model together; each has an equal part.
    gathered:
        As one rank gathers the tensors, and reduces their gradients.
    """

    held: int = 0
    gathered: int = 0


@lru_cache(maxsize=4096)
def layer_padding(facts: ModelFacts, index: int, *, shards: int, ep: int) -> Padding:
    """Return the padding of a layer that is sharded over ``shards`` ranks, its experts distributed over ``ep``."""
    layer = facts.layers[index]
    dense = sum(_dense(w, shards) for w in layer.weights if w.part is not Part.EXPERT)
    if not isinstance(layer.mlp, Moe):
        return Padding(dense, dense)
    here, ranks = layer.mlp.num_experts // ep, shards // ep
    experts = sum(_of_experts((here, *each), ranks, divided=ep > 1) for each in _own_shapes(layer.mlp))
    return Padding(dense + ep * experts, dense + experts)


@lru_cache(maxsize=1024)
def outer_padding(facts: ModelFacts, part: Part, *, shards: int) -> int:
    """Return the padding of what lies outside of layers and belongs to ``part``: embedding, last norm, head."""
    outside = (weight for weight, _, layer in facts.placed(mtp=False) if layer is None)
    return sum(_dense(weight, shards) for weight in outside if weight.part is part)


@lru_cache(maxsize=1024)
def model_padding(facts: ModelFacts, *, shards: int, ep: int) -> int:
    """Return the padding of all layers and of what lies outside of them, on all ranks of one copy together."""
    inside = sum(layer_padding(facts, index, shards=shards, ep=ep).held for index in facts.alike)
    return inside + sum(outer_padding(facts, part, shards=shards) for part in (Part.EMBEDDING, Part.NORM, Part.LM_HEAD))


@lru_cache(maxsize=1024)
def rounded_gradients(facts: ModelFacts, *, shards: int, ep: int) -> int:
    """Return the bytes of one rank's float32 gradients in pinned memory of torch, which takes the next power of two.

    FSDP2 brings each tensor's gradient to the host in memory of its own where parameters are there
    (``torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py``, ``ATen/core/CachingHostAllocator.h``).
    """
    inside = sum(_layer_gradients(facts, index, shards=shards, ep=ep) for index in facts.alike)
    outside = (weight for weight, _, layer in facts.placed(mtp=False) if layer is None)
    return inside + sum(_gradient(weight, shards) for weight in outside)


@lru_cache(maxsize=4096)
def _layer_gradients(facts: ModelFacts, index: int, *, shards: int, ep: int) -> int:
    layer = facts.layers[index]
    dense = sum(_gradient(weight, shards) for weight in layer.weights if weight.part is not Part.EXPERT)
    if not isinstance(layer.mlp, Moe):
        return dense
    here, ranks = layer.mlp.num_experts // ep, shards // ep
    for rest in _own_shapes(layer.mlp):
        divided = ep > 1 and sharded_dimension((here, *rest), ranks) > 0
        held = here * prod(rest) // ranks if divided else -(-here // ranks) * prod(rest)
        dense += _power_of_two(4 * held)
    return dense


def _gradient(weight: Weight, shards: int) -> int:
    if not weight.trained:
        return 0
    return _power_of_two(4 * -(-weight.shape[0] // shards) * prod(weight.shape[1:])) * weight.copies


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _more(size: int, ranks: int) -> int:
    return -size % ranks


def _dense(weight: Weight, shards: int) -> int:
    # untrained weights are buffers, which every rank holds whole
    return _more(weight.shape[0], shards) * prod(weight.shape[1:]) * weight.copies if weight.trained else 0


def _of_experts(shape: tuple[int, ...], ranks: int, *, divided: bool) -> int:
    """Return the padding of a tensor of experts; without expert parallelism FSDP2 divides it as all others."""
    if divided and sharded_dimension(shape, ranks) > 0:
        return 0
    return _more(shape[0], ranks) * prod(shape[1:])


def _own_shapes(moe: Moe) -> list[tuple[int, ...]]:
    """Return the shapes of the model's own tensors of experts, without the first dimension, which counts experts."""
    if moe.names.fused:
        return [weight.shape[1:] for weight in moe.expert_weights]
    return [
        (moe.moe_intermediate_size * (2 if moe.gated else 1), moe.expert_width),
        (moe.expert_width, moe.moe_intermediate_size),
    ]
