"""The matrices that Muon updates, by a model's facts (`hpcrl.modeling.hidden_matrices` has those of the real model)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from hpcrl.models.expert_shards import sharded_dimension
from hpcrl.models.facts import ModelFacts
from hpcrl.models.layers import Moe
from hpcrl.models.tensors import Part, Weight

BATCH_BYTES = 128 << 20
"""Maximum bytes of matrices that a rank processes at once (`hpcrl.trainer.step.muon`)."""
ITERATION_COPIES = 5
"""A batch, its scaled copy, the Gram matrices and their polynomial, and the next iterate, all in bfloat16."""
_STEPS = 5
_OTHERS = {Part.EMBEDDING, Part.LM_HEAD, Part.NORM, Part.ROUTER}


class MuonMatrices(NamedTuple):
    """All matrices of a model that Muon updates.

    Attributes
    ----------
    parameters, of_experts:
        Elements of all of them, and of those of routed experts.
    largest:
        Elements of the largest one.
    operations:
        Operations of the Newton–Schulz iterations of one step.
    """

    parameters: int
    of_experts: int
    largest: int
    operations: float


@lru_cache(maxsize=64)
def muon_matrices(facts: ModelFacts) -> MuonMatrices:
    """Return the totals of a model, without modules of multi-token prediction."""
    parameters = of_experts = largest = 0
    operations = 0.0
    for weight, count, shape in _all(facts):
        elements = math.prod(shape)
        parameters += count * elements
        of_experts += count * elements * (weight.part is Part.EXPERT)
        largest = max(largest, elements)
        less, more = sorted(shape)
        # two products of rows x columns x rows, and one of squares
        operations += count * _STEPS * (4.0 * less**2 * more + 2.0 * less**3)
    return MuonMatrices(parameters, of_experts, largest, operations)


def _all(facts: ModelFacts) -> Iterator[tuple[Weight, int, tuple[int, int]]]:
    """Yield each weight with the number of its matrices and their rows and columns."""
    for weight, _, layer in facts.placed(mtp=False):
        if layer is None or weight.part in _OTHERS or not weight.trained or weight.name.endswith("bias"):
            continue
        if "conv1d" in weight.name or "weights_proj" in weight.name or len(weight.shape) < 2:
            continue
        rows, columns = weight.shape[-2:]
        count = weight.copies * math.prod(weight.shape[:-2])
        yield weight, count, (rows, columns)


def spared_bytes(facts: ModelFacts, *, muon: bool) -> int:
    """Return the bytes of moments that AdamW would have of matrices that ``muon`` updates, over one copy of a model."""
    return 4 * muon_matrices(facts).parameters if muon else 0


def moments_formula(state: str, spared: int, inputs: dict[str, float | str]) -> str:
    """Return the formula of a rank's part of ``state``, less what is spared, of which ``inputs`` then have M."""
    if not spared:
        return f"{state} / N"
    inputs["M"] = spared // 4
    return f"({state} - 4 M) / N"


def exchanged_parameters(facts: ModelFacts, *, shards: int, ep: int) -> tuple[float, float]:
    """Return the elements of matrices that ranks have parts of, of one copy of the model: dense ones, and experts'.

    The first are exchanged among all ``shards`` ranks, the second among the ``shards / ep`` that have the same experts;
    experts that lie whole on a rank are none of them.
    """
    found = muon_matrices(facts)
    dense = float(found.parameters - found.of_experts) if shards > 1 else 0.0
    ranks, experts = shards // ep, 0.0
    if ranks > 1 and ep > 1:
        for layer in facts.layers:
            if isinstance(layer.mlp, Moe):
                experts += _cut(layer.mlp, layer.mlp.num_experts // ep, ranks) * ep
    return dense, experts


def _cut(moe: Moe, here: int, ranks: int) -> int:
    """Return the elements of a rank's experts in one layer whose matrices are divided among ``ranks``."""
    width, inner = moe.expert_width, moe.moe_intermediate_size
    shapes = [(inner * (2 if moe.gated else 1), width), (width, inner)]
    return sum(here * a * b for a, b in shapes if sharded_dimension((here, a, b), ranks))
