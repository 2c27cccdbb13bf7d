"""Dense attention by torch's fused kernel for CPUs, which never has the scores of all pairs of tokens.

Short sequences of like lengths go through it together, padded by a third at most; long ones go one by one. These, and
neighbours of one length, stay in place.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hpcrl.modeling.kernels.kernel import QKV, Attended, QueryRange, Segments, score_dtype
from hpcrl.modeling.memory.transfer import kept_for_layers

_LONG = 2048
"""Tokens from which a single sequence uses all threads of the kernel."""
_WINDOW_STEP = 1024
"""Queries that share one mask if there is a window."""


class _Padded(NamedTuple):
    """Sequences of like lengths: ``places [n, longest]`` of tokens, padded with the last token of each.

    ``real`` are the flat places without padding, ``tokens`` the token at each place.
    """

    places: Tensor
    real: Tensor
    tokens: Tensor


class _Row(NamedTuple):
    """Sequences of one length, concatenated."""

    tokens: slice
    sequences: int


class _Part(NamedTuple):
    """One call of the kernel; ``keys`` are ``queries`` where they are padded."""

    queries: _Padded | _Row
    keys: _Padded | _Row
    causal: bool
    mask: Tensor | None = None


class FusedKernel:
    """See `hpcrl.modeling.kernels.kernel.Kernel`."""

    name = "fused"

    def forward(self, inputs: QKV, segments: Segments, scale: float) -> Attended:
        """See `Kernel`."""
        width, wide = inputs.v.shape[2], max(inputs.q.shape[2], inputs.v.shape[2])
        q, k, v = (_widen(x, wide) for x in inputs)
        parts = _parts(segments)
        if _is_one(parts, q, k):
            y, sums = _forward(QKV(q, k, v), parts[0], scale)
            return Attended(_flat(y)[..., :width].contiguous(), _flat(sums))
        out = q.new_zeros(*q.shape[:2], width)
        lse = torch.full(q.shape[:2], float("-inf"), dtype=score_dtype(q.dtype), device=q.device)
        for part in parts:
            y, sums = _forward(QKV(q, k, v), part, scale)
            _put(out, part.queries, y[..., :width])
            _put(lse[..., None], part.queries, sums[..., None])
        return Attended(out, lse)

    def backward(self, grad: Tensor, inputs: QKV, attended: Attended, segments: Segments, scale: float) -> QKV:
        """See `Kernel`."""
        widths, lse = [x.shape[2] for x in inputs], attended.lse
        q, k, v, out, grad = (_widen(x, max(widths)) for x in (*inputs, attended.out, grad))
        parts = _parts(segments)
        if _is_one(parts, q, k):
            found = _backward(grad, QKV(q, k, v), Attended(out, lse), parts[0], scale)
            return QKV(*(_flat(x)[..., :n] for x, n in zip(found, widths, strict=True)))
        # keys of one window are keys of the next one, too
        kind = q.dtype if segments.window is None else score_dtype(q.dtype)
        dq = torch.zeros_like(q)
        dk, dv = (torch.zeros(x.shape, dtype=kind, device=x.device) for x in (k, v))
        for part in parts:
            found = _backward(grad, QKV(q, k, v), Attended(out, lse), part, scale)
            _put(dq, part.queries, found[0])
            _add(dk, part.keys, found[1])
            _add(dv, part.keys, found[2])
        return QKV(*(x[..., :n].to(q.dtype) for x, n in zip((dq, dk, dv), widths, strict=True)))


def _forward(inputs: QKV, part: _Part, scale: float) -> tuple[Tensor, Tensor]:
    """Return the output ``[n, heads, tokens of each, dim]`` and logarithms ``[n, heads, tokens of each]`` of a part."""
    q, k, v = inputs
    found: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        _take(q, part.queries),
        _take(k, part.keys),
        _take(v, part.keys),
        0.0,
        part.causal,
        attn_mask=None if part.mask is None else part.mask.to(q.dtype),
        scale=scale,
    )
    return found


def _backward(grad: Tensor, inputs: QKV, attended: Attended, part: _Part, scale: float) -> QKV:
    """Return gradients of the inputs of a part, ``[n, heads, tokens of each, dim]``."""
    (q, k, v), (out, lse) = inputs, attended
    own, sums = _take(grad, part.queries), _take(lse[..., None], part.queries)[..., 0]
    if isinstance(part.queries, _Padded):
        # padding repeats the last token of a sequence, so that no weight exceeds 1; its gradient is set to 0
        filled = torch.ones_like(part.queries.places, dtype=torch.bool)
        filled.view(-1)[part.queries.real] = False
        own = own.masked_fill(filled[:, None, :, None], 0.0)
    found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        own,
        _take(q, part.queries),
        _take(k, part.keys),
        _take(v, part.keys),
        _take(out, part.queries),
        sums.contiguous(),
        0.0,
        part.causal,
        attn_mask=None if part.mask is None else part.mask.to(q.dtype),
        scale=scale,
    )
    return QKV(*found)


def _is_one(parts: tuple[_Part, ...], q: Tensor, k: Tensor) -> bool:
    """Return whether a single part has all tokens in place, so that the kernel's result needs no copy."""
    if len(parts) != 1:
        return False
    (part,) = parts
    rows = (part.queries, q), (part.keys, k)
    return all(isinstance(row, _Row) and row.tokens == slice(0, len(x)) for row, x in rows)


def _flat(x: Tensor) -> Tensor:
    """Permute ``[n, heads, tokens of each, …]`` to ``[tokens, heads, …]``; a view of the kernel's result."""
    return x.transpose(1, 2).flatten(0, 1)


def _widen(x: Tensor, width: int) -> Tensor:
    """Pad values with zeros to the width of keys, which the kernel requires; zeros do not change the result."""
    return F.pad(x, (0, width - x.shape[2])) if x.shape[2] < width else x


def _take(x: Tensor, where: _Padded | _Row) -> Tensor:
    """Permute ``[tokens, heads, dim]`` to ``[n, heads, tokens of each, dim]``."""
    return (_split(x, where) if isinstance(where, _Row) else x[where.places]).transpose(1, 2)


def _split(x: Tensor, row: _Row) -> Tensor:
    """Return a view ``[n, tokens of each, heads, dim]``."""
    return x[row.tokens].view(row.sequences, -1, *x.shape[1:])


def _put(target: Tensor, where: _Padded | _Row, x: Tensor) -> None:
    """Store the inverse of `_take`, without padding."""
    if isinstance(where, _Row):
        _split(target, where).copy_(x.transpose(1, 2))
    else:
        target.index_copy_(0, where.tokens, x.transpose(1, 2).flatten(0, 1)[where.real])


def _add(target: Tensor, where: _Padded | _Row, x: Tensor) -> None:
    """Add gradients of keys: several windows share a key; the keys of an uncut sequence are its own."""
    if isinstance(where, _Row):
        _split(target, where).add_(x.transpose(1, 2))
    else:
        _put(target, where, x.to(target.dtype))


@kept_for_layers(8)
def _parts(segments: Segments) -> tuple[_Part, ...]:
    parts: list[_Part] = []
    short: list[slice] = []
    for run in segments:
        tokens = run.queries.stop - run.queries.start
        if segments.window is not None and tokens > segments.window:
            parts += _windows(run, segments.window)
        elif segments.causal and tokens < _LONG:
            short.append(run.queries)
        else:
            parts.append(_Part(_Row(run.queries, 1), _Row(run.keys, 1), segments.causal))
    short.sort(key=lambda tokens: tokens.start - tokens.stop)
    while short:
        longest = short[0].stop - short[0].start
        room = max(1, _LONG // longest)
        group = [tokens for tokens in short[:room] if 4 * (tokens.stop - tokens.start) >= 3 * longest]
        del short[: len(group)]
        where = _row(group) or _pad(group, longest)
        parts.append(_Part(where, where, causal=True))
    return tuple(parts)


def _row(group: list[slice]) -> _Row | None:
    """Return a row of adjacent sequences of equal length, which need neither padding nor copies; None for others."""
    if any(a.stop != b.start or a.stop - a.start != b.stop - b.start for a, b in pairwise(group)):
        return None
    return _Row(slice(group[0].start, group[-1].stop), len(group))


def _pad(group: list[slice], longest: int) -> _Padded:
    begins, ends = (np.asarray([getattr(tokens, name) for tokens in group])[:, None] for name in ("start", "stop"))
    places = begins + np.arange(longest)
    real = np.flatnonzero(places < ends)
    return _Padded(*map(torch.from_numpy, (np.minimum(places, ends - 1), real, places.flatten()[real])))


def _windows(run: QueryRange, window: int) -> Iterator[_Part]:
    """Yield ranges of queries, each with all keys that any of them sees."""
    for begin in range(run.queries.start, run.queries.stop, _WINDOW_STEP):
        end = min(begin + _WINDOW_STEP, run.queries.stop)
        first = max(run.keys.start, begin - window + 1)
        mask = _mask(end - begin, end - first, window)
        yield _Part(_Row(slice(begin, end), 1), _Row(slice(first, end), 1), causal=False, mask=mask)


@kept_for_layers(8)
def _mask(queries: int, keys: int, window: int) -> Tensor:
    """Return the mask for the last queries of ``keys``; equal for all pieces of a sequence except its ends."""
    distance = np.arange(keys - queries, keys)[:, None] - np.arange(keys)
    seen = (distance >= 0) & (distance < window)
    return torch.from_numpy(np.where(seen, np.float32(0.0), np.float32("-inf")))
