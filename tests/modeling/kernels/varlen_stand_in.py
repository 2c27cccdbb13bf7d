"""Functions with the signatures of torch's `varlen_attn`, and what they compute, in plain torch on a processor.

FlashAttention of torch is for GPUs. Signatures are those of ``torch/nn/attention/varlen.py`` in the releases 2.11.0
(its wheel ``torch-2.11.0-cp312-cp312-manylinux_2_28_x86_64.whl``) and 2.13.0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def varlen_attn_of_2_11(  # noqa: PLR0917 - theirs
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Any:
    """This release says nothing of heads in groups, and so they are refused."""
    assert query.shape[1] == key.shape[1] == value.shape[1]
    assert query.shape[2] == key.shape[2] == value.shape[2]
    assert (max_q, max_k) == tuple(int(starts.diff().max()) for starts in (cu_seq_q, cu_seq_k))
    out, lse = _attend(query, key, value, (cu_seq_q, cu_seq_k), scale, window_size)
    return (out, lse) if return_aux is not None and return_aux.lse else out


def varlen_attn_of_2_13(  # noqa: PLR0917 - theirs
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Any:
    share, rest = divmod(query.shape[1], key.shape[1])
    assert rest == 0
    if not enable_gqa and share != 1:
        raise ValueError("Expect query and key/value to have the same number of heads")
    assert cu_seq_k is not None
    key, value = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
    out, lse = _attend(query, key, value, (cu_seq_q, cu_seq_k), scale, window_size)
    return (out, lse) if return_aux is not None and return_aux.lse else out


def varlen_backward(  # noqa: PLR0917 - theirs
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: Tensor,
    scale: float | None = None,
    window_size: list[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``torch_attn::_varlen_attn_backward``: the same schema in both releases; ``out`` and ``lse`` are given."""
    assert window_size is not None
    assert is_causal == (tuple(window_size) == (-1, 0))
    assert rng_state.dtype == torch.uint64
    share, factor = query.shape[1] // key.shape[1], 1.0 if scale is None else scale
    spread = [x.repeat_interleave(share, 1).float() for x in (key, value)]
    dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (query, *spread))
    for rows, keys, seen in _segments(cu_seq_q, cu_seq_k, (window_size[0], window_size[1])):
        q, k, v, grad = query[rows].float(), spread[0][keys], spread[1][keys], grad_out[rows].float()
        weights = (torch.einsum("qhd,khd->hqk", q, k) * factor - lse[:, rows, None]).exp()
        weights = weights.masked_fill(~seen, 0.0)
        inner = (grad * out[rows].float()).sum(-1).T[..., None]
        slopes = weights * (torch.einsum("qhd,khd->hqk", grad, v) - inner) * factor
        dq[rows] = torch.einsum("hqk,khd->qhd", slopes, k)
        dk[keys] += torch.einsum("hqk,qhd->khd", slopes, q)
        dv[keys] += torch.einsum("hqk,qhd->khd", weights, grad)
    of_k, of_v = (torch.unflatten(x, 1, (key.shape[1], share)).sum(2).to(query.dtype) for x in (dk, dv))
    return dq.to(query.dtype), of_k, of_v


def _segments(cu_seq_q: Tensor, cu_seq_k: Tensor, window: tuple[int, int]) -> Iterator[tuple[slice, slice, Tensor]]:
    """Queries and keys of each segment, and which sees which; the last query is at the last key."""
    for (begin, end), (first, last) in zip(pairwise(cu_seq_q.tolist()), pairwise(cu_seq_k.tolist()), strict=True):
        if begin == end or first == last:
            continue
        distance = torch.arange(end - begin)[:, None] + (last - first) - (end - begin) - torch.arange(last - first)
        seen = torch.ones(end - begin, last - first, dtype=torch.bool)
        if window[0] >= 0:
            seen &= distance <= window[0]
        if window[1] >= 0:
            seen &= distance >= -window[1]
        yield slice(begin, end), slice(first, last), seen


def _attend(  # noqa: PLR0917 - as theirs
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: tuple[Tensor, Tensor],
    scale: float | None,
    window: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    out = torch.zeros_like(query)
    # where a query sees nothing FlashAttention says plus infinity
    lse = torch.full((query.shape[1], len(query)), math.inf)
    for rows, keys, seen in _segments(*starts, window):
        scores = torch.einsum("qhd,khd->hqk", query[rows].float(), key[keys].float())
        scores = (scores * (1.0 if scale is None else scale)).masked_fill(~seen, -math.inf)
        lse[:, rows] = scores.logsumexp(-1)
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value[keys].float()).to(query.dtype)
    return out, lse
