"""Products by DeepGEMM (github.com/deepseek-ai/DeepGEMM 2.1 and later, or the package ``sgl-deep-gemm``) on Hopper.

Never run on a GPU by this project: `tests/modeling/fp8/test_fp8_gpu.py` holds it to the reference where there is one.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from hpcrl.modeling.fp8.backends import Groups
from hpcrl.modeling.fp8.fused_quantiser import find_quantiser
from hpcrl.modeling.fp8.quantiser import Quantised
from hpcrl.modeling.libraries import loading

_NEEDED = ("fp8_gemm_nt", "m_grouped_fp8_gemm_nt_contiguous", "k_grouped_fp8_gemm_nt_contiguous")
_BY_ROWS = (1, 1, 128)
"""DeepGEMM's recipe for a product of two matrices that are both quantised by rows."""
_TOKENS_ARE_ROWS, _TOKENS_ARE_SUMMED = "nk", "mn"
"""Sizes of a product ``[m, k] @ [n, k].T`` that DeepGEMM compiles into a kernel: those of the weight. Each new value
takes seconds to compile, and numbers of tokens differ between micro-batches."""


def need_hopper(device: torch.device) -> None:
    """Raise LookupError unless ``device`` is an NVIDIA Hopper GPU: others lack float32 scales of 128 numbers."""
    if device.type != "cuda":
        raise LookupError(f"is for GPUs of NVIDIA, and this trainer computes on {device.type}")
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9:
        raise LookupError(f"multiplies with float32 scales on Hopper (9.0) alone, and this GPU has {major}.{minor}")


class DeepGemm:
    """See `hpcrl.modeling.fp8.backends.Backend`."""

    name = "deep_gemm"

    def __init__(self, device: torch.device) -> None:
        """Load the library (LookupError with the reason if that fails)."""
        need_hopper(device)
        ways = " (DeepGEMM from its sources, or sgl-deep-gemm for this torch)"
        with loading("is not installed where the trainer runs, or does not load", ways):
            self._library: Any = import_module("deep_gemm")
        self.version = str(getattr(self._library, "__version__", "of an unknown version"))
        missing = [name for name in _NEEDED if not hasattr(self._library, name)]
        if missing:
            raise LookupError(f"{self.version} is too old or too new: it has no {', '.join(missing)}")
        self.quantiser = find_quantiser(device)

    def multiply(self, a: Quantised, b: Quantised, dtype: torch.dtype) -> Tensor:
        """See `Backend`; made in bfloat16, or in float32 from that for such a model."""
        product = a.values.new_empty(len(a.values), len(b.values), dtype=torch.bfloat16)
        self._library.fp8_gemm_nt(tuple(a), tuple(b), product, compiled_dims=_TOKENS_ARE_ROWS)
        return product.to(dtype)

    def multiply_rows(self, a: Quantised, b: Quantised) -> Tensor:
        """See `Backend`."""
        # zeros: the kernel adds to its output
        product = a.scales.new_zeros(len(a.values), len(b.values))
        if a.values.shape[1]:
            self._library.fp8_gemm_nt(
                *(tuple(a), tuple(b), product), c=product, recipe=_BY_ROWS, compiled_dims=_TOKENS_ARE_SUMMED
            )
        return product

    def multiply_groups(self, a: Quantised, b: Quantised, groups: Groups, dtype: torch.dtype) -> Tensor:
        """See `Backend`."""
        product = a.values.new_empty(len(a.values), b.values.shape[1], dtype=torch.bfloat16)
        if len(a.values):
            self._library.m_grouped_fp8_gemm_nt_contiguous(
                *(tuple(a), tuple(b), product, groups.experts), compiled_dims=_TOKENS_ARE_ROWS
            )
        return product.to(dtype)

    def multiply_within_groups(self, a: Quantised, b: Quantised, groups: Groups) -> Tensor:
        """See `Backend`. It waits for the device: DeepGEMM asks the host for the sizes of groups."""
        sizes: list[int] = groups.sizes.tolist()
        product = a.scales.new_zeros(len(sizes), len(a.values), len(b.values))
        if sum(sizes):
            self._library.k_grouped_fp8_gemm_nt_contiguous(
                *(_flat(a, sizes), _flat(b, sizes), product, sizes, groups.sizes.int()),
                c=product,
                recipe=_BY_ROWS,
                compiled_dims=_TOKENS_ARE_SUMMED,
            )
        return product


def _flat(rows: Quantised, sizes: list[int]) -> tuple[Tensor, Tensor]:
    """Return the groups concatenated, each ``[rows, size]`` contiguous, and the scales of all of them, column-major."""
    parts = [part.flatten() for part in torch.split(rows.values[:, : sum(sizes)], sizes, 1)]
    return torch.cat(parts), rows.scales[:, : sum(sizes) // 128]
