"""Programs in Triton that quantise in one pass: a matrix is read once, and each number is written once.

A scale is a product with the constant of `hpcrl.modeling.fp8.quantiser`, as torch has it on every device. Reciprocals
are rounded as IEEE says (``div_rn``): those of Triton's ``/`` are not, and numbers would differ in a bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hpcrl.modeling.fp8.quantiser import SCALE_OF_AMAX, TMA_ROWS

_SCALE_OF_AMAX = tl.constexpr(SCALE_OF_AMAX)
_TMA_ROWS = tl.constexpr(TMA_ROWS)


@triton.jit
def quantise_tiles(
    x,
    values,
    scales,
    rows,
    columns,
    stride_matrix,
    stride_row,
    stride_column,
    least,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BY_ROW: tl.constexpr,
    WHOLE_ROWS: tl.constexpr,
):
    """Quantise a tile of ``ROWS`` rows and ``BLOCK`` columns of a matrix, with a scale per row or for the tile.

    ``values [matrices, padded rows, padded columns]``; rows are padded if ``WHOLE_ROWS``. Scales of rows have the
    layout of `hpcrl.modeling.fp8.quantiser.empty_row_scales`, ``[matrices, blocks, aligned rows]`` in memory.
    """
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    matrix, blocks = tl.program_id(0).to(tl.int64), tl.num_programs(2)
    at = matrix * stride_matrix + row.to(tl.int64)[:, None] * stride_row + column.to(tl.int64)[None, :] * stride_column
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tile = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(tile), 1)
    padded = rows
    if WHOLE_ROWS:
        padded = tl.num_programs(1) * ROWS
    if BY_ROW:
        scale = tl.maximum(largest, least) * tl.full([ROWS], _SCALE_OF_AMAX, tl.float32)
        aligned = (rows + _TMA_ROWS - 1) // _TMA_ROWS * _TMA_ROWS
        place = (matrix * blocks + tl.program_id(2)) * aligned + row
        tl.store(scales + place, scale, mask=row < padded)
    else:
        # a vector of equal numbers: the reciprocal of a scalar would not be a tensor
        every = tl.full([ROWS], 0.0, tl.float32) + tl.max(largest, 0)
        scale = tl.maximum(every, least) * tl.full([ROWS], _SCALE_OF_AMAX, tl.float32)
        place = (matrix * tl.num_programs(1) + tl.program_id(1)) * blocks + tl.program_id(2)
        tl.store(scales + place, tl.max(scale, 0))
    reciprocal = tl.div_rn(tl.full([ROWS], 1.0, tl.float32), scale)
    to = (matrix * padded + row.to(tl.int64))[:, None] * (blocks * BLOCK) + column[None, :]
    made = (tile * reciprocal[:, None]).to(values.dtype.element_ty)
    tl.store(values + to, made, mask=(row < padded)[:, None] & (column < blocks * BLOCK)[None, :])
