"""Sparse attention forward by FlashMLA (github.com/deepseek-ai/FlashMLA), backward by hpcrl's programs in Triton.

``flash_mla.flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v)`` as of commit 9241ae3 (April 2026), whose normaliser is
a natural logarithm; another base would be found by the trial at the start. On Hopper it takes bfloat16, keys of 576 or
512 channels of which 512 are values, 64 or 128 heads, and a multiple of 128 indices a query (two blocks of 64,
``csrc/sm90/prefill/sparse/phase1.cuh``), where -1 is none. A query that sees nothing gets plus infinity as its
normaliser. It has no backward pass. Never run on a GPU by this project: tests put a function that keeps to this
contract in its place.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hpcrl.modeling.kernels.kernel import Attended
from hpcrl.modeling.libraries import loading
from hpcrl.modeling.sparse_kernels.by_triton import TritonKernel
from hpcrl.modeling.sparse_kernels.kernel import Chosen, SparseShape

_HEADS = (64, 128)
_INDICES = 128
_VALUE_DIM, _DIMS = 512, (512, 576)


class FlashMla(TritonKernel):
    """See `hpcrl.modeling.sparse_kernels.kernel.SparseKernel`."""

    name = "flash_mla"

    def __init__(self, device: torch.device, shape: SparseShape) -> None:
        """Load the library (LookupError with the reason if it cannot run)."""
        need_hopper_shape(device, shape)
        with loading("is not installed where the trainer runs, or does not load"):
            library: Any = import_module("flash_mla")
        if not hasattr(library, "flash_mla_sparse_fwd"):
            raise LookupError("is too old: it has no flash_mla_sparse_fwd")
        self._sparse_fwd: Any = library.flash_mla_sparse_fwd
        super().__init__(device, shape)

    def forward(self, inputs: Chosen) -> Attended:
        """See `SparseKernel`."""
        heads = inputs.q.shape[1]
        if not len(inputs.q):
            return super().forward(inputs)
        q, indices = with_heads(inputs.q), with_indices(inputs.chosen)
        rows = inputs.rows.contiguous()[:, None]
        out, _, lse = self._sparse_fwd(q, rows, indices[:, None], inputs.scale, inputs.value_dim)
        lse = lse.masked_fill(lse == float("inf"), float("-inf"))
        return Attended(out[:, :heads].contiguous(), lse[:, :heads].contiguous())


def need_hopper_shape(device: torch.device, shape: SparseShape) -> None:
    """Raise LookupError if Hopper's kernels for latents of 512 channels do not support ``device`` or ``shape``."""
    if device.type != "cuda":
        raise LookupError(f"is for GPUs of NVIDIA, and this trainer computes on {device.type}")
    if (found := torch.cuda.get_device_capability(device)) != (9, 0):
        raise LookupError(f"is used on Hopper (9.0) alone, and this GPU has {found[0]}.{found[1]}")
    if shape.dtype != torch.bfloat16:
        raise LookupError("computes in bfloat16: set trainer.dtype: bfloat16")
    if shape.value_dim != _VALUE_DIM or shape.dim not in _DIMS:
        what = f"this model has {shape.value_dim} and {shape.dim}"
        raise LookupError(f"takes latents of {_VALUE_DIM} channels, {_DIMS[0]} or {_DIMS[1]} with rotary ones; {what}")
    if shape.heads > _HEADS[-1]:
        raise LookupError(f"takes {_HEADS[-1]} heads at most, and this model has {shape.heads}")


def with_heads(x: Tensor) -> Tensor:
    """Pad ``[T, heads, …]`` to a number of heads that has a kernel; the zeros contribute to no gradient."""
    heads = x.shape[1]
    more = next(n for n in _HEADS if n >= heads) - heads
    padding = (0, 0) * (x.ndim - 2) + (0, more)
    return F.pad(x, padding) if more else x.contiguous()


def with_indices(chosen: Tensor) -> Tensor:
    """Pad ``[T, width]`` int32 to a multiple of 128 indices; the added ones are -1."""
    return F.pad(chosen, (0, -chosen.shape[1] % _INDICES), value=-1).contiguous()
