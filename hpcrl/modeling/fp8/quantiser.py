"""The one quantiser: e4m3 with a scale for each 128 x 128 block of a weight, or each 128 numbers of a row.

Trainer, hand-off and readers use it. Of weights every bit is what vLLM 0.32 makes of the unquantised matrix when it
loads one with ``quantization: fp8_per_block`` (as DeepGEMM's `per_block_cast_to_fp8`): the same floor of scales, and a
product with the reciprocal of a scale, not a quotient. Blocks begin with a matrix; what a last block lacks is zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hpcrl.weights.format.quantize import BLOCK

__all__ = [
    "E4M3_MAX",
    "LEAST_OF_BLOCK",
    "LEAST_OF_ROW",
    "PLAIN",
    "Quantised",
    "Quantiser",
    "block_amax",
    "dequantise",
    "quantise",
    "quantise_blocks",
    "quantise_rows",
    "scales_of",
]

E4M3_MAX = 448.0
LEAST_OF_BLOCK = 1e-4
"""The largest magnitude of a block of weights counts as this at least."""
LEAST_OF_ROW = 1e-30
"""The same for a row of activations or gradients: gradients are divided by the tokens of a batch, and may be as small
as 1e-12 throughout; with the floor of weights they would be rounded to nothing. Its reciprocal is still finite."""


class Quantised(NamedTuple):
    """A matrix, or several: whole blocks, so those of the last ones that go beyond the matrix are zeros.

    Attributes
    ----------
    values:
        ``[..., rows, columns]`` float8_e4m3fn.
    scales:
        Float32: of `quantise_blocks` ``[..., rows / 128, columns / 128]``, of `quantise_rows`
        ``[..., rows, columns / 128]``.
    """

    values: Tensor
    scales: Tensor

    @property
    def mT(self) -> Quantised:
        """Transposed. Quantised blocks stay what they are; of quantised rows it would be something else."""
        return Quantised(self.values.mT.contiguous(), self.scales.mT.contiguous())

    def dequantised(self) -> Tensor:
        """The numbers that it stands for, float32."""
        cut = torch.unflatten(self.values.float(), -1, (-1, BLOCK))
        if self.scales.shape[-2] == self.values.shape[-2]:
            return (cut * self.scales[..., None]).flatten(-2)
        return (torch.unflatten(cut, -3, (-1, BLOCK)) * self.scales[..., :, None, :, None]).flatten(-4, -3).flatten(-2)


def quantise_blocks(weight: Tensor) -> Quantised:
    """Matrices ``[..., rows, columns]`` in blocks of 128 x 128."""
    rows, columns = weight.shape[-2:]
    padded = F.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = torch.unflatten(torch.unflatten(padded, -1, (-1, BLOCK)), -3, (-1, BLOCK))
    scales = scales_of(blocks.abs().amax((-3, -1)).float())
    values = _rounded(blocks, scales[..., :, None, :, None]).flatten(-4, -3).flatten(-2)
    return Quantised(values, scales)


def quantise_rows(x: Tensor) -> Quantised:
    """Matrices ``[..., rows, columns]``, 128 numbers of a row at a time."""
    groups = torch.unflatten(F.pad(x, (0, -x.shape[-1] % BLOCK)), -1, (-1, BLOCK))
    scales = groups.abs().amax(-1).float().clamp(LEAST_OF_ROW) / E4M3_MAX
    return Quantised(_rounded(groups, scales[..., None]).flatten(-2), scales)


class Quantiser(NamedTuple):
    """What does `quantise_rows` and `quantise_blocks` on a device."""

    rows: Callable[[Tensor], Quantised]
    blocks: Callable[[Tensor], Quantised]


PLAIN = Quantiser(quantise_rows, quantise_blocks)
"""In plain torch: it defines every bit."""


def _rounded(x: Tensor, scales: Tensor) -> Tensor:
    return (x.float() * (1.0 / scales)).to(torch.float8_e4m3fn)


def scales_of(amax: Tensor) -> Tensor:
    """What a quantised element of a block is multiplied with, ``max(amax, LEAST_OF_BLOCK) / E4M3_MAX``.

    Of the largest magnitudes of blocks of weights, float32 of any shape: the same shape.
    """
    return amax.clamp(LEAST_OF_BLOCK) / E4M3_MAX


def block_amax(part: Tensor, low: tuple[int, ...]) -> Tensor:
    """The largest magnitude in each 128 x 128 block that ``part`` touches, of a matrix that is cut between ranks.

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


def quantise(part: Tensor, low: tuple[int, ...], scales: Tensor) -> Tensor:
    """``part [rows, columns]`` of a matrix, from index ``low`` of it, in float8_e4m3fn.

    ``scales [blocks, blocks]`` float32 are those of the blocks that it touches (see `block_amax`).
    """
    return _rounded(part, _spread(scales, low, tuple(part.shape)))


def dequantise(quantised: Tensor, scales: Tensor, low: tuple[int, ...] = (0, 0)) -> Tensor:
    """In float32 a whole matrix ``[rows, columns]``, or the part of it from index ``low``.

    ``scales [blocks, blocks]`` float32 are those of the blocks that it touches (see `block_amax`).
    """
    return quantised.float() * _spread(scales, low, tuple(quantised.shape))


def _spread(scales: Tensor, low: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    """The scale of each element."""
    for dim, (begin, size) in enumerate(zip(low, shape, strict=True)):
        blocks = torch.arange(begin, begin + size, device=scales.device) // BLOCK - begin // BLOCK
        scales = scales.index_select(dim, blocks)
    return scales
