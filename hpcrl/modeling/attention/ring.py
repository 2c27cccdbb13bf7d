"""Ring attention: dense attention over sequences that are cut among the ranks of a context-parallel group.

Keys and values travel around the ranks once in a forward pass and once, with their gradients, in a backward pass. Each
rank has a chunk near the head and one near the tail of each sequence (`hpcrl.modeling.attention.balanced_chunks`).
Unlike with exchanged heads (`hpcrl.modeling.attention.context_parallel`) any number of ranks can share any number of
heads. Softmaxes over the keys of each rank are merged by their sums (Liu et al., Ring Attention, arXiv 2310.01889).
Results are equal on every run: keys come in a fixed order.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hpcrl.modeling.attention.balanced_chunks import Chunks, head_tail, places
from hpcrl.modeling.context import BatchContext, RoutedExpertsRecorder
from hpcrl.modeling.kernels.attend import add_sinks, kernel_for, merge, sink_gradients
from hpcrl.modeling.kernels.kernel import QKV, Attended, Kernel, Segments, score_dtype
from hpcrl.modeling.memory.transfer import movable

_GRADIENTS = 1
"""Tag of gradients of keys and values: they travel while keys and values, with tag 0, do."""


class _Block(NamedTuple):
    """Queries of this rank and keys of another one that see each other; indices are None where all do."""

    queries: Tensor | None
    keys: Tensor | None
    segments: Segments


@movable
class RingAttention:
    """An `hpcrl.modeling.context.AttentionFn` for this rank's chunks of a packed batch."""

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
        self._group, self._rank, self._ranks = group, dist.get_rank(group), dist.get_world_size(group)
        starts = tuple(cu_seqlens.tolist())
        chunks = [head_tail(starts, rank, self._ranks) for rank in range(self._ranks)]
        mine = chunks[self._rank]
        self._tokens = [each.starts[-1] for each in chunks]
        self.own = torch.tensor(mine.tokens, dtype=torch.int64)
        """``[tokens of this rank]`` int64: indices of this rank's tokens in the batch."""
        sequence = torch.bucketize(self.own, cu_seqlens[1:], right=True)
        self.sequences = sequence
        self.positions = self.own - cu_seqlens[sequence]
        """``[tokens of this rank]`` int64: position of each in its sequence."""
        self.blocks = [self._block(rank, mine, theirs) for rank, theirs in enumerate(chunks)]
        """Blocks of queries and keys, by the rank that the keys are from."""

    def _block(self, origin: int, mine: Chunks, theirs: Chunks) -> _Block:
        if origin == self._rank:
            # head and tail in the order of their positions: plain causal attention
            return _Block(None, None, Segments(mine.starts, mine.starts, causal=True))
        if origin < self._rank:
            # its heads precede all tokens of this rank, its tails follow them: only its heads are visible
            keys = tuple(accumulate(map(len, theirs.heads), initial=0))
            return _Block(None, places(theirs, tails=False), Segments(mine.starts, keys, causal=False))
        # its heads and tails lie between this rank's heads and tails: only the tails see them
        queries = tuple(accumulate(map(len, mine.tails), initial=0))
        return _Block(places(mine, tails=True), None, Segments(queries, theirs.starts, causal=False))

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
        """See `AttentionFn`; ``layer`` is not used because nothing is cached.

        Raises
        ------
        ValueError
            There is a window: most of the exchanged keys would not be visible.
        """
        if window is not None:
            raise ValueError("ring attention has no window; share the context by heads (cp_scheme: ulysses)")
        scale = q.shape[2] ** -0.5 if scale is None else scale
        how = (self, scale, kernel_for(QKV(q, k, v)))
        out: Tensor = _RingAttention.apply(how, sinks, q, k, v)  # type: ignore[no-untyped-call]
        return out

    def around(self, rows: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield the rows of each rank in turn: the rank that they are from, and the rows.

        ``rows`` is ``[tokens of this rank, …]``; yielded ones have the tokens of the rank that they are from. The first
        ones are this rank's own. The next rows are received meanwhile.
        """
        for turn in range(self._ranks):
            origin = (self._rank - turn) % self._ranks
            last = turn == self._ranks - 1
            # begun before the turn, so that the transfer overlaps with its computation
            coming = None if last else self.pass_on(rows, origin)
            yield origin, rows
            if coming is None:
                return
            rows = coming.wait()

    def pass_on(self, rows: Tensor, origin: int, *, tag: int = 0) -> IncomingRows:
        """Begin to send ``rows``, of rank ``origin``, to the next rank, and to receive those of the rank before.

        ``[tokens of origin, …]`` is sent, ``[tokens of origin - 1, …]`` (modulo ranks) is received. ``tag`` tells
        transfers apart of which several are under way.
        """
        tokens = self._tokens[(origin - 1) % self._ranks]
        sent, received = rows.contiguous(), rows.new_empty(tokens, *rows.shape[1:])
        before, behind = (dist.get_global_rank(self._group, (self._rank + i) % self._ranks) for i in (-1, 1))
        # batched: separate sends and receives could wait for each other around the ring
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, behind, self._group, tag),
                dist.P2POp(dist.irecv, received, before, self._group, tag),
            ]
        )
        return IncomingRows(works, received, sent)

    def context(self, select: Tensor | None = None, record: RoutedExpertsRecorder | None = None) -> BatchContext:
        """Return the context of a forward pass over this rank's tokens.

        ``select`` is ``[selected]`` int64, indices of this rank's tokens: see `BatchContext`.
        """
        return BatchContext(self.positions, self, select, record)


class IncomingRows(NamedTuple):
    """Rows that are being received; ``sent`` is kept alive until both transfers have ended."""

    works: list[dist.Work]
    received: Tensor
    sent: Tensor

    def wait(self) -> Tensor:
        """Return the received rows; what is queued on the device after this finds them there."""
        for work in self.works:
            work.wait()
        return self.received


def _picked(x: Tensor, index: Tensor | None) -> Tensor:
    return x if index is None else x[index]


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, how: tuple[RingAttention, float, Kernel], sinks: Tensor | None, *inputs: Tensor) -> Tensor:
        (ring, scale, kernel), (q, k, v) = how, inputs
        kind = score_dtype(q.dtype)
        # float32: partial softmaxes are merged once per rank, and rounding would add up; -inf: no key so far
        out = torch.zeros(*q.shape[:2], v.shape[2], dtype=kind, device=q.device)
        lse = torch.full(q.shape[:2], float("-inf"), dtype=kind, device=q.device)
        for origin, rows in ring.around(_joined(k, v)):
            block = ring.blocks[origin]
            keys, values = _split(_picked(rows, block.keys), k, v)
            found = kernel.forward(QKV(_picked(q, block.queries), keys, values), block.segments, scale)
            where = slice(None) if block.queries is None else block.queries
            out[where], lse[where] = merge(Attended(out[where], lse[where]), found)
        attended = Attended(out.to(q.dtype), lse)
        # once at the end: per rank they would count several times in the softmax
        if sinks is not None:
            attended = add_sinks(attended, sinks)
        ctx.save_for_backward(sinks, *inputs, *attended)
        ctx.how = how
        return attended.out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        sinks, q, k, v, out, lse = ctx.saved_tensors
        (ring, scale, kernel), (grad,) = ctx.how, gradients
        grad = grad.contiguous()
        kind = score_dtype(q.dtype)
        dq, rows = torch.zeros_like(q, dtype=kind), _joined(k, v)
        coming: IncomingRows | None = None
        for origin, passing in ring.around(rows):
            block = ring.blocks[origin]
            keys, values = _split(_picked(passing, block.keys), k, v)
            own = QKV(_picked(q, block.queries), keys, values)
            attended = Attended(_picked(out, block.queries), _picked(lse, block.queries))
            found = kernel.backward(_picked(grad, block.queries), own, attended, block.segments, scale)
            # each index occurs once, so that the order of the additions is fixed and results are deterministic
            dq[slice(None) if block.queries is None else block.queries] += found.q
            # gradients of these keys, summed by the ranks before: they arrived during the computation of this turn
            carried = torch.zeros_like(passing, dtype=kind) if coming is None else coming.wait()
            carried[slice(None) if block.keys is None else block.keys] += _joined(found.k, found.v)
            coming = ring.pass_on(carried, origin, tag=_GRADIENTS)
        # gradients of keys travelled one turn behind their keys: the last step brought this rank its own
        assert coming is not None
        dk, dv = _split(coming.wait(), k, v)
        of_sinks = None if sinks is None else sink_gradients(grad, Attended(out, lse), sinks)
        return None, of_sinks, dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _joined(k: Tensor, v: Tensor) -> Tensor:
    """Return keys and values, or their gradients, packed as ``[tokens, numbers]`` for sending."""
    return torch.cat((k.flatten(1), v.flatten(1)), dim=1)


def _split(rows: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys and values that `_joined` packed into rows, with the heads of ``k`` and ``v``."""
    keys, values = torch.split(rows, [k[0].numel(), v[0].numel()], dim=1)
    return keys.reshape(len(rows), *k.shape[1:]), values.reshape(len(rows), *v.shape[1:])
