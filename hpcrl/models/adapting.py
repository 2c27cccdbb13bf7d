"""Matrices of a model that get low-rank adapters, the numbers of their parameters, and matrices that cannot be
adapted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from hpcrl.models.facts import ModelFacts
from hpcrl.models.tensors import DTYPE_BYTES, Part, Weight


class AdapterSettings(Protocol):
    """Settings of ``trainer.lora`` (`hpcrl.config.lora.LoraConfig`)."""

    @property
    def rank(self) -> int: ...

    @property
    def scale(self) -> float: ...

    @property
    def targets(self) -> Sequence[str] | None: ...

    @property
    def experts(self) -> str: ...


TARGET_PARTS: dict[str, tuple[Part, ...]] = {
    "attention": (Part.ATTENTION, Part.MAMBA, Part.LINEAR_ATTENTION),
    "mlp": (Part.DENSE_MLP,),
    "shared_experts": (Part.SHARED_EXPERT,),
    "experts": (Part.EXPERT,),
}
"""The parts of a model by the names of ``trainer.lora.targets``."""


def unread_by_peft(facts: ModelFacts, targets: Sequence[str] | None) -> tuple[str, ...]:
    """Return the targets whose adapters PEFT (0.21) ignores silently.

    It takes their names for those of fused experts.

    Matrices of experts have the names of dense blocks and shared experts (``gate_proj``, ...), and PEFT gives all of
    these names to the experts where a model has any (huggingface/peft#3711).
    """
    if not facts.num_experts:
        return ()
    wanted = TARGET_PARTS if targets is None else targets
    return tuple(
        target
        for target in ("mlp", "shared_experts")
        if target in wanted and any(_matrices(layer.weights, target) for layer in facts.layers)
    )


def _matrices(weights: Sequence[Weight], target: str) -> list[Weight]:
    return [w for w in weights if w.quantised and w.part in TARGET_PARTS[target] and len(w.shape) == 2]


def lora_parameters(facts: ModelFacts, rank: int, targets: Sequence[str] | None, *, shared_outer: bool) -> int:
    """Return the number of parameters of all adapters: ``r (in + out)`` for each matrix.

    Gate and up of an expert have one A. With ``shared_outer`` that A and the B of down are there once a layer.

    Parameters
    ----------
    targets:
        Keys of `TARGET_PARTS`; None for all.
    """
    total = 0
    for layer in facts.layers:
        for target in TARGET_PARTS if targets is None else targets:
            matrices = _matrices(layer.weights, target)
            if target != "experts":
                total += sum(rank * sum(w.shape) * w.copies for w in matrices)
            elif matrices:
                # the last matrix returns to the width of the first one's input
                *into, back = matrices
                outer = 1 if shared_outer else back.copies
                total += rank * (outer * (into[0].shape[1] + back.shape[0]) + back.copies * back.shape[1])
                total += sum(rank * w.shape[0] * w.copies for w in into)
    return total


def published_adapters(facts: ModelFacts, rank: int, targets: Sequence[str] | None) -> int:
    """Return the number of parameters of a version of adapters, where each matrix has its own A and B.

    For a weight ``[out, in]`` that is ``rank * (out + in)``, once for each of its copies (experts).

    Parameters
    ----------
    targets:
        Kinds of matrices of ``trainer.lora.targets``; None: all.
    """
    return sum(
        rank * sum(weight.shape) * weight.copies
        for layer in facts.layers
        for target in (TARGET_PARTS if targets is None else targets)
        for weight in _matrices(layer.weights, target)
    )


def adapted_blocks(facts: ModelFacts, targets: Sequence[str] | None, dtype: str) -> tuple[int, int]:
    """Return the bytes in ``dtype`` of the blocks that adapters change: of routed experts, and of all else in layers.

    A block (``self_attn``, ``mlp``) goes whole where one of its matrices has an adapter: engines load what they fuse
    together (`hpcrl.weights.read.adapters.adapter_blocks`).
    """
    experts = others = 0
    for layer in facts.layers:
        adapted = [
            w for target in (TARGET_PARTS if targets is None else targets) for w in _matrices(layer.weights, target)
        ]
        blocks = {_block(weight) for weight in adapted}
        for weight in layer.weights:
            if _block(weight) in blocks:
                size = weight.elements * DTYPE_BYTES[weight.dtype or dtype]
                experts, others = (experts + size, others) if weight.part is Part.EXPERT else (experts, others + size)
    return experts, others


def _block(weight: Weight) -> str:
    return weight.name.partition(".")[0]


def lora_problems(facts: ModelFacts, targets: Sequence[str] | None) -> Iterator[str]:
    """Yield the problems of ``trainer.lora.targets`` for this model, as texts."""
    if targets is not None:
        if not targets:
            yield "names nothing that is trained"
        if len(set(targets)) < len(targets):
            yield "names something twice"
    found = {target: any(_matrices(layer.weights, target) for layer in facts.layers) for target in TARGET_PARTS}
    for target in dict.fromkeys(targets or ()):
        if found[target]:
            continue
        stacked = any(w.part in TARGET_PARTS[target] for layer in facts.layers for w in layer.weights)
        if stacked:
            yield f"there are no adapters for the {target} of {facts.name}, one tensor with gates and ups in turn"
        else:
            has = ", ".join(name for name, there in found.items() if there)
            yield f"{facts.name} has no {target.replace('_', ' ')}; it has {has}"
