"""Block-wise e4m3 of a matrix whose 128 x 128 blocks may be cut between ranks: bit-equal to one rank's."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hpcrl.weights.format.quantize import BLOCK

__all__ = ["block_amax", "dequantise", "quantise", "scales_of"]

E4M3_MAX = 448.0


def block_amax(part: Tensor, low: tuple[int, ...]) -> Tensor:
    """The largest magnitude in each 128 x 128 block that ``part`` touches.

    Parameters
    ----------
    part:
        ``[rows, columns]`` of a matrix, from index ``low`` of it.
    low:
        Two numbers.

    Returns
    -------
    Tensor
        ``[blocks, blocks]``, float32.
    """
    before = [i % BLOCK for i in low]
    after = [-(i + size) % BLOCK for i, size in zip(before, part.shape, strict=True)]
    padded = F.pad(part.float().abs(), (before[1], after[1], before[0], after[0]))
    rows, columns = padded.shape[0] // BLOCK, padded.shape[1] // BLOCK
    return padded.view(rows, BLOCK, columns, BLOCK).amax(dim=(1, 3))


def scales_of(amax: Tensor) -> Tensor:
    """What a quantised element is multiplied with, of each block; 1 for blocks of zeros."""
    return torch.where(amax > 0, amax / E4M3_MAX, torch.ones_like(amax))


def quantise(part: Tensor, low: tuple[int, ...], scales: Tensor) -> Tensor:
    """``part`` in float8_e4m3fn. ``scales`` are those of the blocks that it touches (see `block_amax`)."""
    spread = _spread(scales, low, tuple(part.shape))
    return (part.float() / spread).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def dequantise(quantised: Tensor, scales: Tensor, low: tuple[int, ...] = (0, 0)) -> Tensor:
    """In float32 a whole matrix, or the part of it from index ``low`` with the scales of the blocks that it touches."""
    return quantised.float() * _spread(scales, low, tuple(quantised.shape))


def _spread(scales: Tensor, low: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    """The scale of each element."""
    for dim, (begin, size) in enumerate(zip(low, shape, strict=True)):
        blocks = torch.arange(begin, begin + size, device=scales.device) // BLOCK - begin // BLOCK
        scales = scales.index_select(dim, blocks)
    return scales
