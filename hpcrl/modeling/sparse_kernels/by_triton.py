"""Sparse attention by hpcrl's own programs in Triton.

They were run and measured on one H200 (docs/gpu.md). `tests/modeling/test_triton_programs.py` runs them in Triton's
interpreter and compiles them for Hopper, `tests/modeling/sparse_kernels/test_sparse_gpu.py` compares them with the
reference where there is a GPU.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpcrl.modeling.kernels.kernel import Attended
from hpcrl.modeling.libraries import loading
from hpcrl.modeling.sparse_kernels.kernel import Chosen, SparseShape

_AMPERE = (8, 0)
_HOPPER = 9
_SCRATCH_BYTES = 1 << 30
"""Maximum bytes of the backward pass for weights, their gradients, and parts of rows' gradients, of some queries."""
_SCORE_BYTES = 1 << 30
_MOST_NARROW = (1 << 31) - 1
"""Maximum elements whose indices fit signed 32-bit integers."""
_SUMMED_AT_ONCE = 16
_SUMMED_CHANNELS = 128


class Blocks(NamedTuple):
    """Sizes of what a program works on: heads and keys; its warps; and stages of its loads."""

    heads: int
    keys: int
    warps: int
    stages: int


class AttentionBlocks(NamedTuple):
    """Blocks of the programs of attention: the forward pass, and the gradient of queries.

    They were chosen by compiling for Hopper at the sizes of GLM-5, and measured on one H200 alone (docs/gpu.md).
    """

    forward: Blocks
    backward: Blocks


HOPPER = AttentionBlocks(Blocks(64, 64, 8, 2), Blocks(64, 32, 8, 2))
"""Hopper's matrix instruction (wgmma) takes 64 rows of a product. One program fills a multiprocessor."""
SMALL = AttentionBlocks(Blocks(32, 64, 8, 2), Blocks(32, 32, 8, 2))
"""For GPUs with less shared memory, by the matrix instruction of Ampere: 113 and 107 KiB for GLM-5."""
INDEX = Blocks(64, 256, 8, 2)
"""Blocks of scores: at least 64 rows per product, which are the heads of some queries."""
_PRODUCTS = 8
"""Products of one program with the same keys, which are read once for 16 queries of 32 heads."""


class TritonKernel:
    """See `hpcrl.modeling.sparse_kernels.kernel.SparseKernel`. Deterministic: nothing is added by atomic operations.

    The gradients of rows are products of some queries at a time, which lie in scratch memory and are then added up row
    by row, in the order of queries.
    """

    name = "triton"
    deterministic = True

    def __init__(self, device: torch.device, shape: SparseShape) -> None:
        """Prepare the kernel (LookupError with the reason if it cannot run)."""
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        if device.type != "cuda" and not interpreted:
            raise LookupError(f"is for GPUs of NVIDIA, and this trainer computes on {device.type}")
        if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < _AMPERE:
            raise LookupError(f"needs a GPU from Ampere (8.0) on, and this one has {found[0]}.{found[1]}")
        if device.type == "cuda" and shape.dtype == torch.float32:
            raise LookupError("computes in bfloat16 and float16: set trainer.dtype: bfloat16")
        with loading("needs the package triton, which does not load here"):
            self._programs: Any = import_module("hpcrl.modeling.sparse_kernels.triton_programs")
        self._blocks = blocks_of(torch.cuda.get_device_capability(device)) if device.type == "cuda" else HOPPER

    def rows_at_once(self, heads: int, keys: int) -> int:
        """See `SparseKernel`; what chooses among scores makes about four tensors of their size."""
        return max(1, _SCORE_BYTES // (4 * keys * 4 or 1))

    def forward(self, inputs: Chosen) -> Attended:
        """See `SparseKernel`."""
        q, rows, chosen = (x.contiguous() for x in inputs.tensors)
        tokens, heads, _ = q.shape
        out = q.new_empty(tokens, heads, inputs.value_dim)
        lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
        if tokens:
            grid = (tokens, -(-heads // _block(heads, self._blocks.forward.heads)))
            self._programs.attend_forward[grid](
                *(q, rows, chosen, out, lse, inputs.scale, heads, chosen.shape[1]),
                **attention_sizes(inputs, self._blocks.forward),
            )
        return Attended(out, lse)

    def backward(self, grad: Tensor, inputs: Chosen, attended: Attended) -> tuple[Tensor, Tensor]:
        """See `SparseKernel`."""
        q, rows, chosen = (x.contiguous() for x in inputs.tensors)
        heads, dim, width = q.shape[1], q.shape[2], chosen.shape[1]
        grad_q = torch.empty_like(q)
        grad_rows = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
        step = max(1, _SCRATCH_BYTES // (width * (2 * heads + dim) * q.element_size()))
        for begin in range(0, len(q), step):
            part = slice(begin, min(begin + step, len(q)))
            own = inputs._replace(q=q[part], rows=rows, chosen=chosen[part])
            done = Attended(attended.out[part], attended.lse[part])
            grad_q[part] = self._backward_part(grad[part].contiguous(), own, done, grad_rows)
        return grad_q, grad_rows.to(rows.dtype)

    def _backward_part(self, grad: Tensor, inputs: Chosen, attended: Attended, grad_rows: Tensor) -> Tensor:
        """Return the gradient of some queries, and add their contribution to ``grad_rows``."""
        q, rows, chosen = inputs.tensors
        tokens, heads, _ = q.shape
        width, value_dim = chosen.shape[1], inputs.value_dim
        inner = (grad.float() * attended.out.float()).sum(-1)
        grad_q = torch.empty_like(q)
        weights, slopes = q.new_empty(2, tokens, heads, width)
        grid = (tokens, -(-heads // _block(heads, self._blocks.backward.heads)))
        self._programs.attend_queries[grid](
            *(q, rows, chosen, grad, attended.lse.contiguous(), inner, grad_q, weights, slopes),
            *(inputs.scale, heads, width),
            **attention_sizes(inputs, self._blocks.backward),
        )
        parts = torch.bmm(slopes.mT, q)
        parts[..., :value_dim].baddbmm_(weights.mT, grad)
        self._add(grad_rows, chosen.flatten(), parts.flatten(0, 1))
        return grad_q

    def _add(self, target: Tensor, numbers: Tensor, parts: Tensor) -> None:
        """Add ``parts [n, dim]`` to the rows ``numbers [n]`` of ``target``; those of -1 go nowhere."""
        # stable: parts of one row keep their order
        ordered, order = torch.sort(numbers, stable=True)
        bounds = torch.arange(len(target) + 1, dtype=numbers.dtype, device=numbers.device)
        ends = torch.searchsorted(ordered, bounds)
        grid = (len(target), -(-target.shape[1] // _SUMMED_CHANNELS))
        self._programs.sum_rows[grid](
            *(parts, order, ends, target),
            DIM=target.shape[1],
            BLOCK_N=_SUMMED_AT_ONCE,
            BLOCK_D=_SUMMED_CHANNELS,
            num_warps=4,
        )

    def index_scores(self, q: Tensor, k: Tensor, weights: Tensor, visible: Tensor) -> Tensor:
        """See `SparseKernel`."""
        tokens = len(q)
        scores = torch.empty(tokens, len(k), dtype=torch.float32, device=q.device)
        if scores.numel():
            sizes = index_sizes(q)
            grid = (-(-tokens // (sizes["PRODUCTS"] * sizes["QUERIES"])), -(-len(k) // sizes["BLOCK_K"]))
            self._programs.index_scores[grid](
                *(q.contiguous(), k.contiguous(), weights.contiguous(), visible.contiguous(), scores, tokens, len(k)),
                **sizes,
            )
        return scores


def index_sizes(q: Tensor) -> dict[str, Any]:
    """Return the compile-time sizes of the program of scores, for ``q [T, heads, dim]``."""
    _, heads, dim = q.shape
    return {
        "HEADS": heads,
        "DIM": dim,
        "PRODUCTS": _PRODUCTS,
        "QUERIES": max(1, INDEX.heads // _power(heads)),
        "BLOCK_H": _power(heads),
        "BLOCK_K": INDEX.keys,
        "BLOCK_D": _power(dim),
        "PRECISION": _precision(q),
        "num_warps": INDEX.warps,
        "num_stages": INDEX.stages,
    }


def blocks_of(capability: tuple[int, int]) -> AttentionBlocks:
    """Return the blocks for an NVIDIA GPU with this compute capability."""
    return HOPPER if capability[0] == _HOPPER else SMALL


def attention_sizes(inputs: Chosen, blocks: Blocks) -> dict[str, Any]:
    """Return the compile-time sizes of the programs of attention."""
    rest = inputs.q.shape[2] - inputs.value_dim
    return {
        "VALUE": inputs.value_dim,
        "REST": rest,
        "BLOCK_H": _block(inputs.q.shape[1], blocks.heads),
        "BLOCK_K": blocks.keys,
        "BLOCK_V": _power(inputs.value_dim),
        "BLOCK_R": _power(rest),
        "WIDE": inputs.rows.numel() > _MOST_NARROW,
        "PRECISION": _precision(inputs.q),
        "num_warps": blocks.warps,
        "num_stages": blocks.stages,
    }


def _block(heads: int, most: int) -> int:
    return min(most, _power(heads))


def _power(size: int) -> int:
    """Return the smallest power of 2 that holds ``size``, at least 16: the minimum for products."""
    return max(16, 1 << (size - 1).bit_length()) if size else 16


def _precision(x: Tensor) -> str:
    """Return the precision of products: float32 is multiplied in float32, not in TF32."""
    return "ieee" if x.dtype == torch.float32 else "tf32"
