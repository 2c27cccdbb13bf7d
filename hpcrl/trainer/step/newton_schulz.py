"""Newton–Schulz iteration: a matrix with its singular vectors and singular values near one.

Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/; the same arithmetic as `torch.optim.Muon` has.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hpcrl.modeling.hidden_matrices import MatrixParts

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_STEPS = 5
_EPS = 1e-7
_ADAMW_RMS = 0.2
"""Root mean square of an element of AdamW's update, which Muon's is scaled to (Moonlight, arXiv 2502.16982)."""


def orthogonalise(matrices: Tensor) -> Tensor:
    """Return ``[n, rows, columns]`` bfloat16 with singular values between about 0.7 and 1.2, in the same shape.

    A matrix of zeros stays one.
    """
    a, b, c = _COEFFICIENTS
    x = matrices.mT if matrices.size(-2) > matrices.size(-1) else matrices
    # the spectral norm is at most the Frobenius norm
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=_EPS)
    for _ in range(_STEPS):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if matrices.size(-2) > matrices.size(-1) else x


def orthogonalise_parts(matrices: Tensor, parts: MatrixParts) -> Tensor:
    """Return `orthogonalise` of each of the ``parts`` of ``[n, rows, columns]``, scaled relative to the first part.

    Times `update_scale` of the whole it is the update that has the learning rate of AdamW.
    """
    if len(parts.slices) == 1:
        return orthogonalise(matrices)
    found = torch.empty_like(matrices)
    whole = update_scale(matrices.shape, parts)
    for part in parts.slices:
        index = (..., part, slice(None)) if parts.dim == -2 else (..., part)
        own = matrices[index]
        scale = _scale(own.shape)
        made = orthogonalise(own)
        found[index] = made if scale == whole else made * (scale / whole)
    return found


def update_scale(shape: torch.Size, parts: MatrixParts) -> float:
    """Return the factor of a parameter's learning rate, ``0.2 · sqrt(max(rows, columns))`` of its first part."""
    size = list(shape[-2:])
    first = range(size[parts.dim])[parts.slices[0]]
    size[parts.dim] = len(first)
    return _scale(torch.Size(size))


def _scale(shape: torch.Size) -> float:
    return float(_ADAMW_RMS * max(shape[-2:]) ** 0.5)
