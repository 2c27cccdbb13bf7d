"""Finds the parameters of a model that are hidden matrices, and the matrices that are concatenated in a parameter.

An optimizer that works on whole matrices (Muon) asks this. Embedding and head, routers, norms, biases, convolutions
and the constants of Mamba-2 are not hidden matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from torch import nn

from hpcrl.modeling.layers.dsa import Indexer
from hpcrl.modeling.layers.mamba import Mamba2
from hpcrl.modeling.layers.mla import LatentAttention
from hpcrl.modeling.layers.moe import ClampedExperts, Experts, Router, SquaredExperts


class MatrixParts(NamedTuple):
    """The matrices in the last two dimensions of a parameter, which may have experts before them.

    Attributes
    ----------
    dim:
        Dimension along which the matrices are concatenated, -2 or -1.
    slices:
        Slices of this dimension, one for each matrix.
    """

    dim: int
    slices: tuple[slice, ...]


WHOLE = MatrixParts(-2, (slice(None),))
"""The last two dimensions are one matrix."""
_ALTERNATING = MatrixParts(-1, (slice(0, None, 2), slice(1, None, 2)))


def hidden_matrices(model: nn.Module) -> dict[str, MatrixParts]:
    """Return the matrices of each parameter of a decoder that consists of hidden matrices, by its name in ``model``."""
    found: dict[str, MatrixParts] = {}
    for prefix, module in model.get_submodule("layers").named_modules(prefix="layers"):
        if isinstance(module, nn.Linear):
            # a router, and the weights of an indexer's heads, give one number to each row: rows have no common space
            if not isinstance(module, Router):
                found[f"{prefix}.weight"] = WHOLE
        elif isinstance(module, Experts):
            gate_up = module.gate_up_proj.shape[-2]
            found[f"{prefix}.gate_up_proj"] = _rows([gate_up // 2, gate_up // 2])
            found[f"{prefix}.down_proj"] = WHOLE
        elif isinstance(module, SquaredExperts):
            found |= {f"{prefix}.up_proj": WHOLE, f"{prefix}.down_proj": WHOLE}
        elif isinstance(module, ClampedExperts):
            found |= {f"{prefix}.gate_up_proj": _ALTERNATING, f"{prefix}.down_proj": WHOLE}
    for prefix, module in model.get_submodule("layers").named_modules(prefix="layers"):
        if isinstance(module, LatentAttention):
            found[f"{prefix}.kv_a_proj_with_mqa.weight"] = _rows([module.latent_dim, module.rope_dim])
        elif isinstance(module, Mamba2):
            gate, _, steps = module.widths
            found[f"{prefix}.in_proj.weight"] = _rows([gate, *module.parts, steps])
        elif isinstance(module, Indexer):
            del found[f"{prefix}.weights_proj.weight"]
    return found


def _rows(sizes: Sequence[int]) -> MatrixParts:
    return MatrixParts(-2, tuple(slice(low, high) for low, high in pairwise(accumulate(sizes, initial=0))))
