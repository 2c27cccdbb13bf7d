"""Dense attention in plain torch: the reference that defines the result, on any device and in any dtype.

Queries are processed in chunks of bounded memory, without a matrix of scores of all pairs of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hpcrl.modeling.kernels.kernel import QKV, Attended, QueryRange, Segments, score_dtype

_CHUNK_BYTES = 64 << 20
"""Approximate bytes of the scores of a chunk of queries."""


class PlainKernel:
    """See `hpcrl.modeling.kernels.kernel.Kernel`. Equal on every run: chunks are added in their order."""

    name = "plain"

    def forward(self, inputs: QKV, segments: Segments, scale: float) -> Attended:
        """See `Kernel`."""
        q, k, v = inputs
        kind = score_dtype(q.dtype)
        out = q.new_zeros(*q.shape[:2], v.shape[2])
        lse = torch.full(q.shape[:2], float("-inf"), dtype=kind, device=q.device)
        for part in _chunks(segments, q.shape[1]):
            scores = _scores(q, k, part, segments, scale)
            sums = scores.logsumexp(-1)
            weights = scores.sub_(sums[..., None]).exp_().to(v.dtype)
            out[part.queries] = _by_token(weights @ _by_head(v[part.keys]), q.shape[1])
            lse[part.queries] = _by_token(sums[..., None], q.shape[1])[..., 0]
        return Attended(out, lse)

    def backward(self, grad: Tensor, inputs: QKV, attended: Attended, segments: Segments, scale: float) -> QKV:
        """See `Kernel`."""
        (q, k, v), (out, lse) = inputs, attended
        kind, key_heads = score_dtype(q.dtype), k.shape[1]
        dq = torch.zeros_like(q)
        dk, dv = (torch.zeros(x.shape, dtype=kind, device=x.device) for x in (k, v))
        for part in _chunks(segments, q.shape[1]):
            sums = _grouped(lse[part.queries][..., None], key_heads)
            weights = _scores(q, k, part, segments, scale).sub_(sums).exp_()
            grad_out = _grouped(grad[part.queries], key_heads)
            inner = (grad_out.to(kind) * _grouped(out[part.queries], key_heads)).sum(-1, keepdim=True)
            grad_weights = (grad_out @ _by_head(v[part.keys]).transpose(1, 2)).to(kind)
            grad_scores = ((grad_weights - inner) * weights * scale).to(q.dtype)
            dq[part.queries] = _by_token(grad_scores @ _by_head(k[part.keys]), q.shape[1])
            own = _grouped(q[part.queries], key_heads)
            dk[part.keys] += (grad_scores.transpose(1, 2) @ own).transpose(0, 1)
            dv[part.keys] += (weights.to(v.dtype).transpose(1, 2) @ grad_out).transpose(0, 1)
        return QKV(dq, dk.to(k.dtype), dv.to(v.dtype))


def _chunks(segments: Segments, heads: int) -> Iterator[QueryRange]:
    for run in segments:
        longest = run.keys.stop - run.keys.start
        step = max(1, _CHUNK_BYTES // (2 * heads * longest * 4))
        for begin in range(run.queries.start, run.queries.stop, step):
            end = min(begin + step, run.queries.stop)
            if not segments.causal:
                yield QueryRange(slice(begin, end), run.keys)
                continue
            first = run.keys.start if segments.window is None else max(run.keys.start, begin - segments.window + 1)
            yield QueryRange(slice(begin, end), slice(first, end))


def _scores(q: Tensor, k: Tensor, part: QueryRange, segments: Segments, scale: float) -> Tensor:
    """Return ``[key_heads, chunk · heads of each, keys]``, minus infinity for keys that a query does not see."""
    scores = (_grouped(q[part.queries], k.shape[1]) @ _by_head(k[part.keys]).transpose(1, 2)).to(score_dtype(q.dtype))
    scores *= scale
    if segments.causal:
        query = torch.arange(part.queries.start, part.queries.stop, device=q.device)[:, None]
        key = torch.arange(part.keys.start, part.keys.stop, device=q.device)
        hidden = key > query if segments.window is None else (key > query) | (key <= query - segments.window)
        scores.masked_fill_(hidden.repeat(q.shape[1] // k.shape[1], 1), float("-inf"))
    return scores


def _by_head(x: Tensor) -> Tensor:
    """Permute ``[tokens, heads, dim]`` to ``[heads, tokens, dim]``."""
    return x.transpose(0, 1)


def _grouped(x: Tensor, key_heads: int) -> Tensor:
    """Permute ``[tokens, heads, dim]`` to ``[key_heads, heads of each · tokens, dim]``: grouped by key head."""
    tokens, heads, dim = x.shape
    by_head = x.transpose(0, 1).reshape(key_heads, heads // key_heads, tokens, dim)
    return by_head.reshape(key_heads, -1, dim)


def _by_token(x: Tensor, heads: int) -> Tensor:
    """Return the inverse of `_grouped`."""
    return x.reshape(heads, -1, x.shape[2]).transpose(0, 1)
