"""How gpt-oss publishes its experts: MXFP4, the microscaling format of the Open Compute Project (MX v1.0).

A weight ``X [experts, in, out]`` is stored as two tensors of bytes. ``X_blocks [experts, out, in / 32, 16]`` has two
numbers of four bits (E2M1) a byte, the first one in the lower bits; ``X_scales [experts, out, in / 32]`` has the power
of two (E8M0) of each block of 32 numbers. The order is that of transformers' ``convert_moe_packed_tensors``, which
returns ``X``. Nothing here writes the format; the arithmetic is in `hpcrl.modeling.mxfp4`.
"""

from __future__ import annotations

__all__ = [
    "BLOCKS_SUFFIX",
    "MXFP4_BLOCK",
    "MXFP4_DTYPE",
    "MXFP4_MAX_SCALE",
    "SCALES_SUFFIX",
    "unpacked_shape",
]

MXFP4_DTYPE = "mxfp4"
"""Dtype of a weight that is stored so; no tensor of torch has it."""
MXFP4_BLOCK = 32
"""Numbers of a block, along the inputs of a matrix."""
MXFP4_MAX_SCALE = 252
"""The largest stored scale with which every number of a block is finite: ``6 * 2 ** (252 - 127)``; 255 is a NaN."""
BLOCKS_SUFFIX, SCALES_SUFFIX = "_blocks", "_scales"


def unpacked_shape(blocks: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the weight whose ``*_blocks`` have the shape ``[experts, out, in / 32, 16]``."""
    experts, outputs, groups, width = blocks
    return experts, 2 * groups * width, outputs
