"""DeepSeek's sparse attention: which tokens each query attends to, and attention over these alone.

What computes it is a kernel (`hpcrl.modeling.sparse_kernels`). A choice is the same on every run and device that has
the same scores: ties are broken by position.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hpcrl.modeling.compile.saved_ops import register_op
from hpcrl.modeling.kernels.kernel import Attended
from hpcrl.modeling.sparse_kernels.kernel import Chosen, SparseKernel
from hpcrl.modeling.sparse_kernels.reference import ReferenceKernel

REFERENCE: SparseKernel = ReferenceKernel()
_IN_USE: dict[str, SparseKernel] = {}
"""Kernels by name: an operator of torch takes names, but not such objects."""


@torch.no_grad()
def choose_tokens(
    q: Tensor, k: Tensor, weights: Tensor, visible: Tensor, top_k: int, *, kernel: SparseKernel = REFERENCE
) -> Tensor:
    """Choose for each query the keys of its sequence with the largest ``sum over heads of weight · relu(q · k)``.

    Parameters
    ----------
    q:
        ``[T, heads, dim]`` of the indexer.
    k:
        ``[S, dim]``, one key for all heads.
    weights:
        ``[T, heads]``.
    visible:
        ``[T]`` int64: number of first keys that a query sees.
    top_k:
        Number of chosen keys; of keys with equal scores those with the lowest index.
    kernel:
        Computes the scores.

    Returns
    -------
    Tensor
        ``[T, min(top_k, S)]`` int32: indices of keys, ascending; then -1 where a query sees fewer.
    """
    _IN_USE[kernel.name] = kernel
    return _choose(q, k, weights, visible, top_k, kernel.name)


@register_op("(Tensor q, Tensor k, Tensor weights, Tensor visible, int top_k, str kernel) -> Tensor")
def _choose(  # noqa: PLR0917 - operators of torch have no others
    q: Tensor, k: Tensor, weights: Tensor, visible: Tensor, top_k: int, kernel: str
) -> Tensor:
    tokens, heads = weights.shape
    width = min(top_k, len(k))
    chosen = torch.empty(tokens, width, dtype=torch.int32, device=q.device)
    step = _IN_USE[kernel].rows_at_once(heads, len(k))
    for begin in range(0, tokens, step):
        part = slice(begin, min(begin + step, tokens))
        scores = _IN_USE[kernel].index_scores(q[part], k, weights[part], visible[part])
        chosen[part] = _largest(scores, visible[part, None], width)
    return chosen


def _largest(scores: Tensor, visible: Tensor, width: int) -> Tensor:
    """Return indices of the ``width`` largest of each row of ``scores``, which are -inf from ``visible [T, 1]`` on.

    `torch.topk` breaks ties in an unspecified way.
    """
    # NaNs remain in the model for the loss to find: here they must not change how many keys are chosen
    scores.nan_to_num_(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))
    last = scores.topk(width, dim=1).values[:, -1:]
    above = scores > last
    level = scores == last
    level &= level.cumsum(1, dtype=torch.int32) <= width - above.sum(1, keepdim=True)
    # the number is known: `nonzero` would wait for the device to count
    chosen = torch.nonzero_static(above | level, size=scores.shape[0] * width)[:, 1].view(-1, width)
    return chosen.masked_fill_(chosen >= visible, -1)


def attend_chosen(inputs: Chosen, kernel: SparseKernel = REFERENCE) -> Tensor:
    """Compute attention of each query over the rows that it chose, by ``kernel``: ``[T, heads, value_dim]``.

    Each query has chosen one row at least. Gradients go to queries and rows.
    """
    _IN_USE[kernel.name] = kernel
    how = (inputs.value_dim, inputs.scale, kernel)
    out: Tensor = _ChosenAttention.apply(*inputs.tensors, how)  # type: ignore[no-untyped-call]
    return out


@register_op("(Tensor q, Tensor rows, Tensor chosen, int value_dim, float scale, str kernel) -> (Tensor, Tensor)")
def _attend(  # noqa: PLR0917
    q: Tensor, rows: Tensor, chosen: Tensor, value_dim: int, scale: float, kernel: str
) -> tuple[Tensor, Tensor]:
    """Return the output, and the normaliser of each query and head in float32."""
    out, sums = _IN_USE[kernel].forward(Chosen(q, rows, chosen, value_dim, scale))
    return out, sums


class _ChosenAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, rows: Tensor, chosen: Tensor, how: tuple[int, float, SparseKernel]) -> Tensor:
        value_dim, scale, kernel = ctx.how = how
        out, sums = _attend(q, rows, chosen, value_dim, scale, kernel.name)
        ctx.save_for_backward(q, rows, chosen, sums, out)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (grad,), (q, rows, chosen, sums, out) = gradients, ctx.saved_tensors
        value_dim, scale, kernel = ctx.how
        inputs = Chosen(q, rows, chosen, value_dim, scale)
        of_q, of_rows = kernel.backward(grad, inputs, Attended(out, sums))
        return of_q, of_rows, None, None
