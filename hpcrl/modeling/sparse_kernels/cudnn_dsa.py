"""Sparse attention forward by FlashMLA, backward by cudnn-frontend (package ``nvidia-cudnn-frontend``).

``cudnn.DSA.sparse_attention_backward_wrapper(q, kv, out, dout, lse, attn_sink, topk_idxs, softmax_scale=…)`` as of
1.32.0 (CUDA 13). On Hopper it takes bfloat16, keys of 576 or 512 channels of which 512 are values, contiguous tensors,
and a sink for each head, which is minus infinity here: none. Rows of -1 are skipped, and so is a query whose normaliser
is plus infinity. It adds to the gradients of rows by atomic operations, so sums differ from run to run; what
is deterministic there is for Blackwell. Never run on a GPU by this project: tests put a function that keeps to this
contract in its place.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from hpcrl.modeling.kernels.kernel import Attended
from hpcrl.modeling.libraries import loading
from hpcrl.modeling.sparse_kernels.flash_mla import FlashMla, with_heads, with_indices
from hpcrl.modeling.sparse_kernels.kernel import Chosen, SparseShape


class FlashMlaCudnn(FlashMla):
    """See `hpcrl.modeling.sparse_kernels.kernel.SparseKernel`."""

    name = "flash_mla_cudnn"
    deterministic = False

    def __init__(self, device: torch.device, shape: SparseShape) -> None:
        """Load the library (LookupError with the reason if it cannot run)."""
        super().__init__(device, shape)
        with loading("needs nvidia-cudnn-frontend 1.32 with nvidia-cutlass-dsl, which does not load here"):
            library: Any = import_module("cudnn")
            # the attribute access imports nvidia-cutlass-dsl
            functions = getattr(library, "DSA", None)
            backward = getattr(functions, "sparse_attention_backward_wrapper", None)
        if backward is None:
            raise LookupError("needs nvidia-cudnn-frontend 1.32: an older one has no DSA")
        self._backward: Any = backward

    def backward(self, grad: Tensor, inputs: Chosen, attended: Attended) -> tuple[Tensor, Tensor]:
        """See `SparseKernel`."""
        heads = inputs.q.shape[1]
        if not len(inputs.q):
            return torch.zeros_like(inputs.q), torch.zeros_like(inputs.rows)
        # a query without weights has a normaliser of plus infinity
        lse = attended.lse.masked_fill(attended.lse == float("-inf"), float("inf"))
        q, out, grad = with_heads(inputs.q), with_heads(attended.out), with_heads(grad)
        found = self._backward(
            *(q, inputs.rows.contiguous(), out, grad, with_heads(lse)),
            lse.new_full((q.shape[1],), float("-inf")),
            with_indices(inputs.chosen),
            softmax_scale=inputs.scale,
        )
        return found["dq"][:, :heads].contiguous(), found["dkv"]
