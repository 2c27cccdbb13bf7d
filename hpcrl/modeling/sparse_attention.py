"""DeepSeek's sparse attention in plain torch: which tokens each query attends to, and attention over these alone.

The reference for kernels, and what CPUs compute. Queries go through in chunks of bounded memory: no tensor has a score
for every pair of tokens, and no key is copied for a query that did not choose it. Memory is linear in tokens times
chosen tokens. Results are equal on every run: ties are broken by position, and the backward pass adds in a fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hpcrl.modeling.kept import as_operator
from hpcrl.modeling.sums import add_rows

__all__ = ["attend_chosen", "choose_tokens"]

_CHUNK_BYTES = 64 << 20
"""About the memory that a chunk of queries takes for a moment."""


@torch.no_grad()
def choose_tokens(q: Tensor, k: Tensor, weights: Tensor, visible: Tensor, top_k: int) -> Tensor:
    """The keys of one sequence with the largest ``sum over heads of weight · relu(q · k)``, for each query.

    Parameters
    ----------
    q:
        ``[T, heads, dim]`` of the indexer.
    k:
        ``[S, dim]``, one key for all heads.
    weights:
        ``[T, heads]``.
    visible:
        ``[T]`` int64: a query sees the first so many keys.
    top_k:
        How many are chosen; of keys with equal scores those with the lowest index.

    Returns
    -------
    Tensor
        ``[T, min(top_k, S)]`` int32: indices of keys, ascending; then -1 where a query sees fewer.
    """
    return _choose(q, k, weights, visible, top_k)


@as_operator("(Tensor q, Tensor k, Tensor weights, Tensor visible, int top_k) -> Tensor")
def _choose(q: Tensor, k: Tensor, weights: Tensor, visible: Tensor, top_k: int) -> Tensor:
    tokens, heads = weights.shape
    width = min(top_k, len(k))
    chosen = torch.empty(tokens, width, dtype=torch.int32, device=q.device)
    step = max(1, _CHUNK_BYTES // (2 * heads * len(k) * 4 or 1))
    keys = k.float().T
    for begin in range(0, tokens, step):
        end = min(begin + step, tokens)
        each = (q[begin:end].flatten(0, 1).float() @ keys).relu_().view(end - begin, heads, -1)
        scores = torch.bmm(weights[begin:end, None].float(), each)[:, 0]
        chosen[begin:end] = _largest(scores, visible[begin:end, None], width)
    return chosen


def _largest(scores: Tensor, visible: Tensor, width: int) -> Tensor:
    """Indices of the ``width`` largest of each row of ``scores``; `torch.topk` breaks ties as it likes."""
    index = torch.arange(scores.shape[1], device=scores.device)
    scores.masked_fill_(index >= visible, float("-inf"))
    # what is not a number stays for the loss to find: here it must not change how many are chosen
    scores.nan_to_num_(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))
    last = scores.topk(width, dim=-1).values[:, -1:]
    above = scores > last
    level = scores == last
    level &= level.cumsum(-1, dtype=torch.int32) <= width - above.sum(-1, keepdim=True)
    # as many as are known beforehand: `nonzero` would wait for the device to learn that
    chosen = torch.nonzero_static(above | level, size=scores.shape[0] * width)[:, 1].view(-1, width)
    return chosen.masked_fill_(chosen >= visible, -1)


def attend_chosen(q: Tensor, rows: Tensor, chosen: Tensor, *, value_dim: int, scale: float) -> Tensor:
    """Attention of each query over the rows that it chose; all heads share keys and values.

    Parameters
    ----------
    q:
        ``[T, heads, dim]``.
    rows:
        ``[S, dim]``: a key; its first ``value_dim`` channels are the value.
    chosen:
        ``[T, width]``: indices of rows; -1 for none. Each query has one at least.
    scale:
        Of the scores.

    Returns
    -------
    Tensor
        ``[T, heads, value_dim]``.
    """
    out: Tensor = _ChosenAttention.apply(q, rows, chosen, (value_dim, scale))  # type: ignore[no-untyped-call]
    return out


@as_operator("(Tensor q, Tensor rows, Tensor chosen, int value_dim, float scale) -> (Tensor, Tensor)")
def _attend(q: Tensor, rows: Tensor, chosen: Tensor, value_dim: int, scale: float) -> tuple[Tensor, Tensor]:
    """The output, and the normaliser of each query and head in float32."""
    out = q.new_empty(*q.shape[:2], value_dim)
    sums = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    for part in _chunks(q, chosen):
        keys, scores = _scores(q[part], rows, chosen[part], scale)
        sums[part] = scores.logsumexp(-1)
        weights = (scores - sums[part][..., None]).exp_().to(q.dtype)
        out[part] = torch.bmm(weights, keys[..., :value_dim])
    return out, sums


class _ChosenAttention(torch.autograd.Function):
    """Softmax attention in chunks of queries; the backward pass computes the weights of each chunk again."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, rows: Tensor, chosen: Tensor, values: tuple[int, float]) -> Tensor:
        value_dim, scale = values
        out, sums = _attend(q, rows, chosen, value_dim, scale)
        ctx.save_for_backward(q, rows, chosen, sums, out)
        ctx.value_dim, ctx.scale = value_dim, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        q, rows, chosen, sums, out = ctx.saved_tensors
        value_dim = ctx.value_dim
        grad_q = torch.empty_like(q)
        grad_rows = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
        for part in _chunks(q, chosen):
            keys, scores = _scores(q[part], rows, chosen[part], ctx.scale)
            weights = (scores - sums[part][..., None]).exp_()
            grad_out = grad[part]
            inner = (grad_out.float() * out[part].float()).sum(-1, keepdim=True)
            grad_weights = torch.bmm(grad_out, keys[..., :value_dim].transpose(1, 2)).float()
            grad_scores = ((grad_weights - inner) * weights * ctx.scale).to(q.dtype)
            grad_q[part] = torch.bmm(grad_scores, keys)
            grad_keys = torch.bmm(grad_scores.transpose(1, 2), q[part])
            grad_keys[..., :value_dim] += torch.bmm(weights.to(q.dtype).transpose(1, 2), grad_out)
            add_rows(grad_rows, chosen[part].clamp(min=0).flatten().long(), grad_keys.flatten(0, 1).float())
        return grad_q, grad_rows.to(rows.dtype), None, None


def _chunks(q: Tensor, chosen: Tensor) -> list[slice]:
    """Queries that are computed together."""
    width, heads, dim = chosen.shape[1], q.shape[1], q.shape[2]
    step = max(1, _CHUNK_BYTES // (width * (3 * dim + 3 * heads) * 4))
    return [slice(begin, min(begin + step, len(q))) for begin in range(0, len(q), step)]


def _scores(q: Tensor, rows: Tensor, chosen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The chosen keys ``[C, width, dim]`` and the scores ``[C, heads, width]`` in float32."""
    keys = rows.index_select(0, chosen.clamp(min=0).flatten()).view(*chosen.shape, -1)
    scores = torch.bmm(q, keys.transpose(1, 2)).float() * scale
    return keys, scores.masked_fill_((chosen < 0)[:, None], float("-inf"))
