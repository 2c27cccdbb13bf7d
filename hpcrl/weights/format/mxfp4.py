"""MXFP4 as gpt-oss publishes its experts: the microscaling format of the Open Compute Project (MX v1.0).

A weight ``X [experts, in, out]`` is stored as two tensors of bytes. ``X_blocks [experts, out, in / 32, 16]`` has two
numbers of four bits (E2M1) a byte, the first one in the lower bits; ``X_scales [experts, out, in / 32]`` has the power
of two (E8M0) of each block of 32 numbers. The order is that of transformers' ``convert_moe_packed_tensors``, which
returns ``X``. Nothing here writes the format; the arithmetic is in `hpcrl.modeling.checkpoint_io.mxfp4`.
"""

from __future__ import annotations

MXFP4_DTYPE = "mxfp4"
"""Dtype name of a weight that is stored in MXFP4; torch has no such dtype."""
MXFP4_BLOCK = 32
"""Numbers per block, along the inputs of a matrix."""
MXFP4_MAX_SCALE = 252
"""Maximum stored scale with which every number of a block is finite: ``6 * 2 ** (252 - 127)``; 255 is a NaN."""
BLOCKS_SUFFIX, SCALES_SUFFIX = "_blocks", "_scales"


def unpacked_shape(blocks: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the weight whose ``*_blocks`` have the shape ``[experts, out, in / 32, 16]``."""
    experts, outputs, groups, width = blocks
    return experts, 2 * groups * width, outputs
