"""The one quantiser: e4m3 with a scale for each 128 x 128 block of a weight, or each 128 numbers of a row.

Trainer, hand-off and readers use it, and it gives the same bits on CPUs and on GPUs: a scale is a product with
`SCALE_OF_AMAX`, never a quotient by 448. Torch divides a float32 tensor on a GPU by a number of the host as a product
with the rounded reciprocal of the number (``BinaryDivTrueKernel.cu``) and on a CPU as IEEE says, so that more than half
of the scales differ in their last bit. What is quantised is a product with the reciprocal of its scale, in both.
vLLM 0.32 (``quantization: fp8_per_block``, as DeepGEMM's `per_block_cast_to_fp8`) has the same floor of scales and, on
GPUs, the same products. Blocks begin with a matrix; what a last block lacks is zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hpcrl.weights.format.quantise import BLOCK

SCALE_OF_AMAX = float.fromhex("0x1.24924ap-9")
"""1 / 448 rounded to float32: the scale of a block, or of 128 numbers of a row, over its largest magnitude. 448 is the
largest number of e4m3. A program may hold it in float32 or float64, because it is the same number in both."""
LEAST_OF_BLOCK = 1e-4
"""Minimum of the largest magnitude of a block of weights; a smaller one counts as this."""
LEAST_OF_ROW = 1e-30
"""The same for a row of activations or gradients: gradients are divided by the tokens of a batch, and may be as small
as 1e-12 throughout; with the floor of weights they would be rounded to nothing. Its reciprocal is still finite."""
TMA_ROWS = 4
"""Float32 scales in the 16 bytes that Hopper's tensor memory accelerator (TMA) wants a column to begin at."""


class Quantised(NamedTuple):
    """A matrix, or several: whole blocks, so those of the last ones that go beyond the matrix are zeros.

    Attributes
    ----------
    values:
        ``[..., rows, columns]`` float8_e4m3fn.
    scales:
        Float32: of `quantise_blocks` ``[..., rows / 128, columns / 128]``, of `quantise_rows`
        ``[..., rows, columns / 128]`` in the layout of `empty_row_scales`.
    """

    values: Tensor
    scales: Tensor

    @property
    def mT(self) -> Quantised:
        """Return the transpose. It is valid for quantised blocks, not for quantised rows."""
        return Quantised(self.values.mT.contiguous(), self.scales.mT.contiguous())

    def dequantised(self) -> Tensor:
        """Return the numbers that it represents, in float32."""
        cut = torch.unflatten(self.values.float(), -1, (-1, BLOCK))
        if self.scales.shape[-2] == self.values.shape[-2]:
            return (cut * self.scales[..., None]).flatten(-2)
        return (torch.unflatten(cut, -3, (-1, BLOCK)) * self.scales[..., :, None, :, None]).flatten(-4, -3).flatten(-2)


def quantise_blocks(weight: Tensor) -> Quantised:
    """Quantise matrices ``[..., rows, columns]`` in blocks of 128 x 128."""
    rows = weight.shape[-2]
    blocks = torch.unflatten(torch.unflatten(_whole(weight, rows), -1, (-1, BLOCK)), -3, (-1, BLOCK))
    scales = scales_of(blocks.abs().amax((-3, -1)).float())
    values = _rounded(blocks, scales[..., :, None, :, None]).flatten(-4, -3).flatten(-2)
    return Quantised(values, scales)


def quantise_rows(x: Tensor) -> Quantised:
    """Quantise matrices ``[..., rows, columns]``, 128 numbers of a row at a time."""
    groups = torch.unflatten(_whole(x), -1, (-1, BLOCK))
    scales = empty_row_scales(x, x.shape[-2], groups.shape[-2])
    scales.copy_(groups.abs().amax(-1)).clamp_(LEAST_OF_ROW).mul_(SCALE_OF_AMAX)
    return Quantised(_rounded(groups, scales[..., None]).flatten(-2), scales)


def empty_row_scales(x: Tensor, rows: int, columns: int) -> Tensor:
    """Make scales ``[..., rows, columns]`` for `quantise_rows` of ``x [..., rows, n]``, not filled.

    Neighbours in memory are those of a column, and columns begin at multiples of `TMA_ROWS`: DeepGEMM reads them as
    they are. It would turn row-major ones over in shared memory, which has room for 907 columns (116,096 summed rows).
    """
    aligned = -(-rows // TMA_ROWS) * TMA_ROWS
    return x.new_empty(*x.shape[:-2], columns, aligned, dtype=torch.float32)[..., :rows].mT


def _whole(x: Tensor, rows: int = 0) -> Tensor:
    """Pad ``x`` with zeros to whole blocks of its columns and ``rows``; return it uncopied if nothing is added."""
    columns, more = -x.shape[-1] % BLOCK, -rows % BLOCK
    return F.pad(x, (0, columns, 0, more)) if columns or more else x


class Quantiser(NamedTuple):
    """Implementation of `quantise_rows` and `quantise_blocks` for a device."""

    rows: Callable[[Tensor], Quantised]
    blocks: Callable[[Tensor], Quantised]


PLAIN = Quantiser(quantise_rows, quantise_blocks)
"""Quantiser in plain torch, which defines every bit of the result."""


def _rounded(x: Tensor, scales: Tensor) -> Tensor:
    return (x.float() * (1.0 / scales)).to(torch.float8_e4m3fn)


def scales_of(amax: Tensor) -> Tensor:
    """Return the factors of quantised elements of blocks, ``max(amax, LEAST_OF_BLOCK) * SCALE_OF_AMAX``.

    ``amax`` holds the largest magnitudes of blocks of weights, float32 of any shape; the result has the same shape.
    """
    return amax.clamp(LEAST_OF_BLOCK) * SCALE_OF_AMAX


def block_amax(part: Tensor, low: tuple[int, ...]) -> Tensor:
    """Return the largest magnitude in each 128 x 128 block that ``part`` touches, of a matrix split between ranks.

    Parameters
    ----------
    part:
        ``[rows, columns]``, a part of the matrix that begins at index ``low``.
    low:
        Row and column.

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
    """Quantise ``part [rows, columns]`` of a matrix, from index ``low`` of it, to float8_e4m3fn.

    ``scales [blocks, blocks]`` float32 are those of the blocks that it touches (see `block_amax`).
    """
    return _rounded(part, _spread(scales, low, tuple(part.shape)))


def dequantise(quantised: Tensor, scales: Tensor, low: tuple[int, ...] = (0, 0)) -> Tensor:
    """Return in float32 a whole matrix ``[rows, columns]``, or the part of it from index ``low``.

    ``scales [blocks, blocks]`` float32 are those of the blocks that it touches (see `block_amax`).
    """
    return quantised.float() * _spread(scales, low, tuple(quantised.shape))


def _spread(scales: Tensor, low: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    """Return the scale of each element."""
    for dim, (begin, size) in enumerate(zip(low, shape, strict=True)):
        blocks = torch.arange(begin, begin + size, device=scales.device) // BLOCK - begin // BLOCK
        scales = scales.index_select(dim, blocks)
    return scales
