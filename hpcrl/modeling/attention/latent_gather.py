"""Latent attention (MLA) over sequences that are cut among ranks of a context-parallel group: one gather a layer.

What a token gives the others is its latent and its rotary key: 576 numbers of DeepSeek-V3, where its keys and values of
all heads are 40,960. Every rank makes keys and values of what its queries see, for some heads at a time, and makes them
again in the backward pass: so it never holds more of them than its own tokens would have with all heads. Gradients of
latents return in one collective; that of the expanding matrix is the part of this rank's queries, and is summed with
all others by the sharding of parameters.

Each rank has a chunk near the head and one near the tail of each sequence (`hpcrl.modeling.attention.balanced_chunks`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hpcrl.modeling.attention.balanced_chunks import head_tail, places
from hpcrl.modeling.compile.saved_ops import register_op
from hpcrl.modeling.context import BatchContext, RoutedExpertsRecorder
from hpcrl.modeling.kernels.attend import kernel_for, merge
from hpcrl.modeling.kernels.kernel import QKV, Attended, Segments, score_dtype
from hpcrl.modeling.memory.transfer import movable
from hpcrl.modeling.parallel.collectives import gather_rows


class _Seen(NamedTuple):
    """Starts of segments: what queries of this rank see is in three runs of rows, none of which repeats a key.

    Attributes
    ----------
    own:
        ``[n + 1]`` of this rank's tokens, which see each other.
    before:
        ``[n + 1]`` of the next rows: tokens before the head of each sequence, which all tokens of this rank see.
    tails, between:
        ``[n + 1]`` of the tails, and of tokens between head and tail of each sequence, which only tails see.
    """

    own: list[int]
    before: list[int]
    tails: list[int]
    between: list[int]

    @property
    def flat(self) -> list[int]:
        """Return all lists concatenated: operators of torch take no nested lists."""
        return [start for starts in self for start in starts]

    @classmethod
    def of(cls, flat: list[int]) -> _Seen:
        """Return the inverse of `flat`."""
        each = len(flat) // 4
        return cls(*(flat[i : i + each] for i in range(0, 4 * each, each)))


@movable
class LatentGather:
    """An `hpcrl.modeling.context.LatentAttentionFn` for this rank's chunks of a packed batch."""

    def __init__(self, cu_seqlens: Tensor, group: dist.ProcessGroup) -> None:
        """Find this rank's chunks, on the host; `hpcrl.modeling.memory.transfer.move` brings them to a device.

        Parameters
        ----------
        cu_seqlens:
            ``[n + 1]`` int64 on the host: start of each sequence of the batch and the end of the last; the same on all
            ranks.
        group:
            The context-parallel ranks.
        """
        self._group, rank, ranks = group, dist.get_rank(group), dist.get_world_size(group)
        starts = tuple(cu_seqlens.tolist())
        chunks = [head_tail(starts, each, ranks) for each in range(ranks)]
        mine = chunks[rank]
        self._ranks = ranks
        self._most = max(each.starts[-1] for each in chunks)
        self.own = torch.tensor(mine.tokens, dtype=torch.int64)
        """``[tokens of this rank]`` int64: indices of this rank's tokens in the batch."""
        self.sequences = torch.bucketize(self.own, cu_seqlens[1:], right=True)
        self.positions = self.own - cu_seqlens[self.sequences]
        """``[tokens of this rank]`` int64: position of each in its sequence."""
        # index of each token of the batch among the gathered rows
        gathered = torch.empty(starts[-1], dtype=torch.int64)
        for number, each in enumerate(chunks):
            gathered[each.tokens] = torch.arange(each.starts[-1]) + number * self._most
        before = [range(begin, head.start) for begin, head in zip(starts[:-1], mine.heads, strict=True)]
        between = [range(head.stop, tail.start) for head, tail in zip(mine.heads, mine.tails, strict=True)]
        seen = [*mine.tokens, *(token for run in (*before, *between) for token in run)]
        self._rows = gathered[seen]
        """Indices of tokens that this rank sees: its own, those before all heads, those between heads and tails."""
        self._tails = places(mine, tails=True)
        self._seen = _Seen(list(mine.starts), *(_starts(runs) for runs in (before, mine.tails, between)))

    def attend_latents(self, layer: int, q: Tensor, latents: Tensor, expand: Tensor, *, scale: float) -> Tensor:
        """See `LatentAttentionFn`; ``layer`` is not used because nothing is cached. One collective."""
        padded = F.pad(latents, (0, 0, 0, self._most - len(latents)))
        everywhere, _ = gather_rows(padded, self._group)
        how = _How(self._seen, -(-q.shape[1] // self._ranks), scale)
        out: Tensor = _LatentAttention.apply(how, self._tails, q, everywhere[self._rows], expand)  # type: ignore[no-untyped-call]
        return out

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `AttentionFn`: there is none for keys and values of heads.

        Raises
        ------
        ValueError
            Always.
        """
        raise ValueError(f"this attention gathers latents, and layer {layer} has none (cp_scheme: ulysses)")

    def context(self, select: Tensor | None = None, record: RoutedExpertsRecorder | None = None) -> BatchContext:
        """Return the context of a forward pass over this rank's tokens.

        ``select`` is ``[selected]`` int64, indices of this rank's tokens: see `BatchContext`.
        """
        return BatchContext(self.positions, self, select, record, latent=self)


def _starts(runs: list[range]) -> list[int]:
    return list(accumulate(map(len, runs), initial=0))


@dataclass(frozen=True, slots=True)
class _How:
    seen: _Seen
    heads_at_once: int
    scale: float


class _Part(NamedTuple):
    """Queries and keys that see each other; ``queries`` are indices, None for all."""

    queries: Tensor | None
    keys: slice
    segments: Segments


def _parts(seen: _Seen, tails: Tensor) -> Iterator[_Part]:
    """Yield parts with disjoint keys; parts without keys are left out (on ranks at the edges of sequences)."""
    own, before = seen.own[-1], seen.own[-1] + seen.before[-1]
    starts = tuple(seen.own)
    yield _Part(None, slice(0, own), Segments(starts, starts, causal=True))
    if seen.before[-1]:
        yield _Part(None, slice(own, before), Segments(starts, tuple(seen.before), causal=False))
    if seen.between[-1] and seen.tails[-1]:
        segments = Segments(tuple(seen.tails), tuple(seen.between), causal=False)
        yield _Part(tails, slice(before, before + seen.between[-1]), segments)


class _Expanded(NamedTuple):
    """Keys ``[rows, heads, key_dim]`` and values ``[rows, heads, value_dim]`` of some heads."""

    k: Tensor
    v: Tensor


def _groups(heads: int, at_once: int) -> Iterator[slice]:
    for first in range(0, heads, at_once):
        yield slice(first, min(first + at_once, heads))


def _expand(latents: Tensor, matrix: Tensor, unrotated: int) -> _Expanded:
    """Expand rows ``[rows, latent + rotary]`` to keys and values by ``matrix [heads, unrotated + value, latent]``."""
    heads, width, latent_dim = matrix.shape
    made = (latents[:, :latent_dim] @ matrix.flatten(0, 1).T).view(len(latents), heads, width)
    # one rotary key for all heads
    rotary = latents[:, None, latent_dim:].expand(-1, heads, -1)
    return _Expanded(torch.cat((made[..., :unrotated], rotary), dim=-1), made[..., unrotated:])


def _picked(x: Tensor, index: Tensor | None) -> Tensor:
    return x if index is None else x[index]


@register_op(
    "(Tensor q, Tensor latents, Tensor expand, Tensor tails, int[] seen, int heads_at_once, float scale)"
    " -> (Tensor, Tensor)"
)
def _attend_latents(  # noqa: PLR0917 - operators of torch have no others
    q: Tensor, latents: Tensor, expand: Tensor, tails: Tensor, seen: list[int], heads_at_once: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output ``[T, heads, value_dim]``, and the logarithms ``[T, heads]`` of sums of exponentials."""
    matrix, unrotated = _by_head(q, latents, expand)
    kind = score_dtype(q.dtype)
    out = q.new_empty(*q.shape[:2], matrix.shape[1] - unrotated)
    lse = torch.empty(q.shape[:2], dtype=kind, device=q.device)
    for heads in _groups(q.shape[1], heads_at_once):
        made = _expand(latents, matrix[heads], unrotated)
        sums = Attended(
            torch.zeros(len(q), *made.v.shape[1:], dtype=kind, device=q.device),
            torch.full((len(q), made.v.shape[1]), float("-inf"), dtype=kind, device=q.device),
        )
        for part in _parts(_Seen.of(seen), tails):
            inputs = QKV(_picked(q[:, heads], part.queries), made.k[part.keys], made.v[part.keys])
            found = kernel_for(inputs).forward(inputs, part.segments, scale)
            where = slice(None) if part.queries is None else part.queries
            sums.out[where], sums.lse[where] = merge(Attended(sums.out[where], sums.lse[where]), found)
        out[:, heads], lse[:, heads] = sums
    return out, lse


def _by_head(q: Tensor, latents: Tensor, expand: Tensor) -> tuple[Tensor, int]:
    """Return the expanding matrix ``[heads, unrotated + value_dim, latent]``, and the unrotated channels of a key."""
    latent_dim = expand.shape[1]
    return expand.view(q.shape[1], -1, latent_dim), q.shape[2] - (latents.shape[1] - latent_dim)


class _LatentAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, how: _How, tails: Tensor, *inputs: Tensor) -> Tensor:
        q, latents, expand = inputs
        out, lse = _attend_latents(q, latents, expand, tails, how.seen.flat, how.heads_at_once, how.scale)
        ctx.save_for_backward(tails, *inputs, out, lse)
        ctx.how = how
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tails, q, latents, expand, out, lse = ctx.saved_tensors
        how: _How = ctx.how
        matrix, unrotated = _by_head(q, latents, expand)
        compressed = latents[:, : matrix.shape[2]]
        parts = list(_parts(how.seen, tails))
        dq = torch.empty_like(q)
        # a latent is read by all heads: in float32, or each group of them would be rounded
        dlatents = torch.zeros_like(latents, dtype=score_dtype(q.dtype))
        dmatrix = torch.zeros_like(matrix) if ctx.needs_input_grad[4] else None
        for heads in _groups(q.shape[1], how.heads_at_once):
            made, own = _expand(latents, matrix[heads], unrotated), matrix[heads].flatten(0, 1)
            attended = Attended(out[:, heads], lse[:, heads])
            dq[:, heads], dk, dv = _gradients(grad[:, heads], QKV(q[:, heads], *made), attended, parts, how.scale)
            dmade = torch.cat((dk[..., :unrotated], dv), dim=-1).flatten(1)
            dlatents[:, : matrix.shape[2]] += dmade @ own
            dlatents[:, matrix.shape[2] :] += dk[..., unrotated:].sum(1, dtype=dlatents.dtype)
            if dmatrix is not None:
                dmatrix[heads] = (dmade.T @ compressed).view_as(dmatrix[heads])
        return None, None, dq, dlatents.to(latents.dtype), None if dmatrix is None else dmatrix.view_as(expand)


def _gradients(grad: Tensor, inputs: QKV, attended: Attended, parts: list[_Part], scale: float) -> QKV:
    """Return the gradients of queries, and of keys and values of all rows; each row is in only one part."""
    q, k, v = inputs
    dq, dk, dv = torch.zeros_like(q, dtype=score_dtype(q.dtype)), torch.zeros_like(k), torch.zeros_like(v)
    for part in parts:
        own = QKV(_picked(q, part.queries), k[part.keys], v[part.keys])
        sums = Attended(*(_picked(x, part.queries) for x in attended))
        found = kernel_for(own).backward(_picked(grad, part.queries), own, sums, part.segments, scale)
        dq[slice(None) if part.queries is None else part.queries] += found.q
        dk[part.keys], dv[part.keys] = found.k, found.v
    return QKV(dq, dk, dv)
