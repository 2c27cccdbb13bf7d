"""The quantiser in one pass on a GPU, bit for bit that of `hpcrl.modeling.fp8.quantiser`, by a program in Triton.

Plain torch goes over a matrix some seven times. On one H200 the program gave every bit of plain torch (docs/gpu.md).
Tests run it in Triton's interpreter, and a trainer on a GPU compares its bits with those of torch before it begins.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from hpcrl.modeling.fp8.quantiser import (
    LEAST_OF_BLOCK,
    LEAST_OF_ROW,
    PLAIN,
    Quantised,
    Quantiser,
    empty_row_scales,
)
from hpcrl.weights.format.quantise import BLOCK

_ROWS_AT_ONCE = 32


def find_quantiser(device: torch.device) -> Quantiser:
    """Return the fused quantiser after a test on ``device``; the plain one if Triton is not installed.

    Raises
    ------
    LookupError
        Triton is installed but does not load, or the fused quantiser fails, or its bits differ from torch's.
    """
    try:
        made = fused_quantiser()
    except ModuleNotFoundError as error:
        if error.name == "triton":
            return PLAIN
        raise LookupError(f"quantises with Triton, which does not load: {error}") from error
    except Exception as error:
        # its import looks for compilers and drivers, and may raise any type
        raise LookupError(f"quantises with Triton, which does not load: {type(error).__name__}: {error}") from error
    try_quantiser(made, device)
    return made


def fused_quantiser(dtype: torch.dtype = torch.float8_e4m3fn) -> Quantiser:
    """Return the quantiser in Triton (ImportError if Triton is not installed).

    With float32 as ``dtype`` values are divided by their scales and not rounded: Triton's interpreter (3.9) does not
    carry when a number is rounded up to the next power of 2.
    """
    programs: Any = import_module("hpcrl.modeling.fp8.triton_programs")

    def quantise(x: Tensor, *, by_row: bool) -> Quantised:
        shape = x.shape
        matrices = x.reshape(-1, *shape[-2:]) if x.ndim != 3 else x
        number, rows, columns = matrices.shape
        step = _ROWS_AT_ONCE if by_row else BLOCK
        down, across = -(-rows // step), -(-columns // BLOCK)
        padded = rows if by_row else down * BLOCK
        values = x.new_empty(*shape[:-2], padded, across * BLOCK, dtype=dtype)
        if by_row:
            scales = empty_row_scales(x, rows, across)
        else:
            scales = x.new_empty(*shape[:-2], down, across, dtype=torch.float32)
        if values.numel():
            programs.quantise_tiles[number, down, across](
                *(matrices, values, scales, rows, columns, *matrices.stride()),
                LEAST_OF_ROW if by_row else LEAST_OF_BLOCK,
                ROWS=step,
                BLOCK=BLOCK,
                BY_ROW=by_row,
                WHOLE_ROWS=not by_row,
                num_warps=4 if by_row else 8,
            )
        return Quantised(values, scales)

    return Quantiser(lambda x: quantise(x, by_row=True), lambda weight: quantise(weight, by_row=False))


def try_quantiser(quantiser: Quantiser, device: torch.device) -> None:
    """Compare ``quantiser`` with torch on random numbers of all magnitudes (LookupError if it fails or differs)."""
    draw = torch.Generator().manual_seed(0)
    # not in bfloat16 in Triton's interpreter, which has no such numbers
    dtype = torch.float32 if os.environ.get("TRITON_INTERPRET") == "1" else torch.bfloat16
    for size in ((3, 200, 150), (33, 260)):
        x = torch.randn(size, generator=draw) * torch.exp2(torch.randint(-40, 40, (size[-2], 1), generator=draw))
        x[..., 1, :] = 0.0
        x = x.to(device, dtype)
        for each in (x, x.mT):
            for name, own, plain in zip(Quantiser._fields, quantiser, PLAIN, strict=True):
                try:
                    found, wanted = own(each), plain(each)
                except Exception as error:
                    raise LookupError(f"quantiser fails: {type(error).__name__}: {error}") from error
                same = torch.equal(found.scales, wanted.scales)
                if not same or not torch.equal(found.values.view(torch.uint8), wanted.values.view(torch.uint8)):
                    raise LookupError(f"quantiser of {name} gives other bits than torch when tried")
