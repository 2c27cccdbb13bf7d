"""Finds the kernel of sparse attention, and checks it against the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hpcrl.errors import UsageError
from hpcrl.modeling.kernels.kernel import Attended
from hpcrl.modeling.sparse_kernels.kernel import Chosen, SparseKernel, SparseShape
from hpcrl.modeling.sparse_kernels.reference import ReferenceKernel

_WHERE = "trainer.kernels.sparse_attention"
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.03}
"""Maximum relative norm of the difference by dtype, for sums in another order."""
_QUERIES, _KEYS = 4, 300

Make = Callable[[torch.device, SparseShape], SparseKernel]


def find_sparse_kernel(name: str, device: torch.device, shape: SparseShape) -> SparseKernel:
    """Return the kernel ``name`` of the recipe's choices for a model of ``shape`` on ``device``.

    On a GPU the kernel is tried first.

    Raises
    ------
    UsageError
        It is not installed, does not support this device, shape or dtype, or its numbers differ from the reference.
    """
    is_plain = device.type != "cuda" or shape.dtype == torch.float32
    if name == "reference" or (name == "auto" and is_plain):
        return ReferenceKernel()
    chosen = "triton" if name == "auto" else name
    try:
        kernel = _kinds()[chosen](device, shape)
        try_kernel(kernel, device, shape)
    except LookupError as error:
        hint = "set it to reference, which is slow and runs everywhere"
        raise UsageError(f"{_WHERE}: {chosen} {error.args[0]}\n    hint: {hint}") from error
    return kernel


def _kinds() -> dict[str, Make]:
    # late imports: their libraries are not installed everywhere
    from hpcrl.modeling.sparse_kernels.by_triton import TritonKernel  # noqa: PLC0415
    from hpcrl.modeling.sparse_kernels.cudnn_dsa import FlashMlaCudnn  # noqa: PLC0415
    from hpcrl.modeling.sparse_kernels.flash_mla import FlashMla  # noqa: PLC0415

    return {"triton": TritonKernel, "flash_mla": FlashMla, "flash_mla_cudnn": FlashMlaCudnn}


class Results(NamedTuple):
    """Results of a kernel: output, normaliser, gradients of queries and rows, scores of an indexer."""

    output: Tensor
    normaliser: Tensor
    of_queries: Tensor
    of_rows: Tensor
    scores: Tensor


def results(kernel: SparseKernel, device: torch.device, shape: SparseShape) -> Results:
    """Return the results of ``kernel`` for a few random queries of ``shape``, some of which see less than others."""
    draw = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=draw).to(device, shape.dtype)

    width = min(shape.width, _KEYS // 2)
    chosen = torch.stack([torch.randperm(_KEYS, generator=draw)[:width] for _ in range(_QUERIES)]).int()
    chosen[0, 1:] = -1
    chosen[1, width // 2 :] = -1
    q, rows = normal(_QUERIES, shape.heads, shape.dim), normal(_KEYS, shape.dim)
    inputs = Chosen(q, rows, chosen.to(device), shape.value_dim, shape.dim**-0.5)
    grad = normal(_QUERIES, shape.heads, shape.value_dim)
    attended = Attended(*kernel.forward(inputs))
    scores = kernel.index_scores(
        normal(_QUERIES, shape.index_heads, shape.index_dim),
        normal(_KEYS, shape.index_dim),
        normal(_QUERIES, shape.index_heads),
        torch.linspace(1, _KEYS, _QUERIES, device=device).long(),
    )
    # scores of invisible keys are -inf, and a norm must be finite; a wrong -inf still differs from the right score
    return Results(*attended, *kernel.backward(grad, inputs, attended), scores.nan_to_num_(neginf=0.0))


def try_kernel(kernel: SparseKernel, device: torch.device, shape: SparseShape) -> None:
    """Compare ``kernel`` on ``device`` with the reference and itself (LookupError if it fails or differs).

    The second result if the kernel claims to be deterministic.
    """
    try:
        found = results(kernel, device, shape)
        again = results(kernel, device, shape) if kernel.deterministic else found
    except Exception as error:
        # compilers and drivers raise any type: the kernel cannot be used
        raise LookupError(f"fails on {device.type}: {type(error).__name__}: {error}") from error
    wanted = results(ReferenceKernel(), device, shape)
    for name, own, other, second in zip(Results._fields, found, wanted, again, strict=True):
        distance = float((own.float() - other.float()).norm() / other.float().norm())
        if not distance <= _TOLERANCE[shape.dtype]:
            what = name.replace("_", " ")
            raise LookupError(f"differs from the reference when tried: {what} by {distance:.1%} of their norm")
        if not torch.equal(own, second):
            raise LookupError(f"gives other numbers each time that it is tried ({name.replace('_', ' ')})")
