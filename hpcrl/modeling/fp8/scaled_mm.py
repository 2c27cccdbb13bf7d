"""Products by torch's own `scaled_mm` (cuBLASLt's block scales) on Hopper.

Torch's grouped product has no block scales of 128 numbers, so experts are multiplied one after the other, and the host
waits to learn how many rows each has. It was run and measured on one H200 (docs/gpu.md), but for matrices with one
block of columns. `tests/modeling/fp8/test_fp8_gpu.py` compares it with the reference where there is a GPU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hpcrl.modeling.fp8.backends import Groups
from hpcrl.modeling.fp8.deep_gemm import need_hopper
from hpcrl.modeling.fp8.fused_quantiser import find_quantiser
from hpcrl.modeling.fp8.quantiser import Quantised
from hpcrl.weights.format.quantise import BLOCK

_ROWS_AT_ONCE = 16
"""cuBLASLt requires numbers of rows that are multiples of this."""
_SCALES_AT_ONCE = 4
"""It requires scales of blocks along the sum in multiples of this."""
_FIRST_CUDA = (12, 9)


class ScaledMm:
    """See `hpcrl.modeling.fp8.backends.Backend`."""

    name = "torch"
    version: str = torch.__version__

    def __init__(self, device: torch.device) -> None:
        """Check that the operator exists (LookupError with the reason if not)."""
        need_hopper(device)
        cuda = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
        if cuda < _FIRST_CUDA:
            raise LookupError(f"needs CUDA 12.9, and this torch was built for {torch.version.cuda}")
        if not hasattr(F, "scaled_mm"):
            raise LookupError(f"needs torch 2.11, and this is {torch.__version__}")
        self.quantiser = find_quantiser(device)

    def multiply(self, a: Quantised, b: Quantised, dtype: torch.dtype) -> Tensor:
        """See `Backend`."""
        scales = _by_columns(F.pad(b.scales, (0, -b.scales.shape[1] % _SCALES_AT_ONCE)).t())
        return _multiply(a, b.values, scales, F.ScalingType.BlockWise128x128, torch.bfloat16).to(dtype)

    def multiply_rows(self, a: Quantised, b: Quantised) -> Tensor:
        """See `Backend`."""
        if not a.values.shape[1]:
            return a.scales.new_zeros(len(a.values), len(b.values))
        padded = _padded(b)
        scales = _by_columns(padded.scales)
        product = _multiply(a, padded.values, scales, F.ScalingType.BlockWise1x128, torch.float32)
        return product[:, : len(b.values)]

    def multiply_groups(self, a: Quantised, b: Quantised, groups: Groups, dtype: torch.dtype) -> Tensor:
        """See `Backend`."""
        product = a.scales.new_zeros(len(a.values), b.values.shape[1], dtype=dtype)
        begin = 0
        for expert, size in enumerate(groups.sizes.tolist()):
            if size:
                rows = slice(begin, begin + size)
                part = Quantised(a.values[rows], a.scales[rows])
                product[rows] = self.multiply(part, Quantised(b.values[expert], b.scales[expert]), dtype)
            begin += size
        return product

    def multiply_within_groups(self, a: Quantised, b: Quantised, groups: Groups) -> Tensor:
        """See `Backend`."""
        product = a.scales.new_zeros(len(groups.sizes), len(a.values), len(b.values))
        begin = 0
        for expert, size in enumerate(groups.sizes.tolist()):
            if size:
                product[expert] = self.multiply_rows(_columns(a, begin, size), _columns(b, begin, size))
            begin += size
        return product


def _multiply(a: Quantised, b: Tensor, scales: Tensor, kind: F.ScalingType, dtype: torch.dtype) -> Tensor:
    padded = _padded(a)
    product: Tensor = F.scaled_mm(
        padded.values,
        b.contiguous().t(),
        _by_columns(padded.scales),
        F.ScalingType.BlockWise1x128,
        scales,
        kind,
        output_dtype=dtype,
    )
    return product[: len(a.values)]


def _padded(rows: Quantised) -> Quantised:
    """Give as many rows as cuBLASLt wants; what is added is zero."""
    more = -len(rows.values) % _ROWS_AT_ONCE
    if not more:
        return Quantised(rows.values.contiguous(), rows.scales)
    # as bytes: not all operators know FP8
    values = F.pad(rows.values.view(torch.uint8), (0, 0, 0, more)).view(torch.float8_e4m3fn)
    return Quantised(values, F.pad(rows.scales.t(), (0, more)).t())


def _by_columns(scales: Tensor) -> Tensor:
    """Return the same numbers column-major without a gap, with exactly the strides that torch requires.

    `torch.Tensor.contiguous` accepts any stride for a single column: the stride of the larger matrix that it was cut
    from would remain.
    """
    rows, columns = scales.shape
    if scales.stride() == (1, rows):
        return scales
    return torch.empty_strided((rows, columns), (1, rows), dtype=scales.dtype, device=scales.device).copy_(scales)


def _columns(rows: Quantised, begin: int, size: int) -> Quantised:
    scales = rows.scales[:, begin // BLOCK : (begin + size) // BLOCK]
    return Quantised(rows.values[:, begin : begin + size].contiguous(), scales)
