"""Weights that are stored in MXFP4 (`hpcrl.weights.format.mxfp4`), as numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from hpcrl.modeling.blocks import HeldBlock
from hpcrl.weights.format.mxfp4 import BLOCKS_SUFFIX, MXFP4_BLOCK, MXFP4_MAX_SCALE, SCALES_SUFFIX
from hpcrl.weights.read.model_files import ModelFiles

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the lower three bits of a number; the fourth is its sign."""


def dequantise_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Multiply blocks with their scales.

    Parameters
    ----------
    blocks:
        ``[..., groups, 16]``, uint8.
    scales:
        ``[..., groups]``, uint8, at most `MXFP4_MAX_SCALE`.

    Returns
    -------
    Tensor
        ``[..., groups * 32]`` in bfloat16, which holds every such number exactly.
    """
    signed = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], dtype=torch.bfloat16)
    byte = torch.arange(256)
    pairs = torch.stack((signed[byte & 15], signed[byte >> 4]), dim=-1)
    numbers = pairs.index_select(0, blocks.reshape(-1).int()).view(*scales.shape, 2 * blocks.shape[-1])
    # bfloat16 has 2 ** -127 as well, though not as a normal number
    powers = torch.tensor([2.0 ** (scale - 127) for scale in range(MXFP4_MAX_SCALE + 1)], dtype=torch.bfloat16)
    factors = powers.index_select(0, scales.reshape(-1).int()).view(*scales.shape, 1)
    return numbers.mul_(factors).flatten(-2)


def read_mxfp4(files: ModelFiles, name: str, part: HeldBlock) -> Tensor:
    """Read ``part`` of the weight ``name``, ``[experts, in, out]``, in bfloat16: whole blocks that it touches."""
    (expert, first, out), (last_expert, last, last_out) = part
    group, end = first // MXFP4_BLOCK, -(-last // MXFP4_BLOCK)
    blocks = _stored(files, name + BLOCKS_SUFFIX, HeldBlock((expert, out, group, 0), (last_expert, last_out, end, 16)))
    scales = _stored(files, name + SCALES_SUFFIX, HeldBlock((expert, out, group), (last_expert, last_out, end)))
    numbers = dequantise_mxfp4(blocks, scales)
    return numbers.narrow(-1, first - group * MXFP4_BLOCK, last - first).transpose(1, 2)


def check_mxfp4_scales(files: ModelFiles, name: str, part: HeldBlock) -> None:
    """Check the scales of ``part`` of the weight ``name`` (ValueError where one makes no finite numbers)."""
    (expert, first, out), (last_expert, last, last_out) = part
    groups = first // MXFP4_BLOCK, -(-last // MXFP4_BLOCK)
    block = HeldBlock((expert, out, groups[0]), (last_expert, last_out, groups[1]))
    largest = int(_stored(files, name + SCALES_SUFFIX, block).max())
    if largest > MXFP4_MAX_SCALE:
        what = "no number" if largest == 255 else f"2 ** {largest - 127}"
        raise ValueError(f"tensor {name + SCALES_SUFFIX!r} has the scale {what}: weights would not be finite")


def _stored(files: ModelFiles, name: str, part: HeldBlock) -> Tensor:
    """Return the bytes of a stored tensor of any dtype, one per number."""
    shape = tuple(high - low for low, high in zip(part.low, part.high, strict=True))
    return torch.frombuffer(files.read(name, *part), dtype=torch.uint8).view(shape)
