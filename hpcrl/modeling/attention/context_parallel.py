"""Attention over sequences that are cut among the ranks of a context-parallel group.

Each rank has an equal run of the flat tokens of a batch. For ordinary attention ranks exchange tokens for heads and
back (Jacobs et al., DeepSpeed Ulysses, arXiv 2309.14509): each attends over all tokens with its share of the heads, so
all have the same work. Where queries choose tokens (DSA), heads share one small key: keys are gathered in one
collective a layer, those of the indexer with them and without gradient, and each rank attends for its own queries.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from hpcrl.modeling.attention.packed import PackedAttention
from hpcrl.modeling.context import BatchContext, IndexQuery, RoutedExpertsRecorder
from hpcrl.modeling.memory.transfer import movable
from hpcrl.modeling.parallel.collectives import exchange_rows, gather_rows
from hpcrl.modeling.sparse_kernels.kernel import Chosen, SparseKernel


def heads_problem(heads: int, key_heads: int, cp: int) -> str:
    """Return why heads cannot be divided over ``cp`` ranks; empty if they can.

    If there are fewer key heads than ranks, keys are repeated as often as needed, which must fit their groups of
    queries.
    """
    if heads % math.lcm(key_heads, cp):
        return f"{heads} query heads on {key_heads} key heads cannot be distributed over cp {cp}"
    return ""


@movable
class ContextParallelAttention:
    """An `hpcrl.modeling.context.AttentionFn` and `SparseAttentionFn` for this rank's run of a packed batch."""

    def __init__(self, whole: PackedAttention, group: dist.ProcessGroup) -> None:
        """Find this rank's run.

        Parameters
        ----------
        whole:
            Attention over all tokens of the batch, a multiple of the ranks of ``group``; the same on all of them.
        group:
            The context-parallel ranks.
        """
        self._whole, self._group, self._ranks = whole, group, dist.get_world_size(group)
        self._tokens, rest = divmod(len(whole.positions), self._ranks)
        assert not rest, (len(whole.positions), self._ranks)
        first = dist.get_rank(group) * self._tokens
        self.own = slice(first, first + self._tokens)
        """Range of this rank's tokens among those of the batch."""
        self.positions = whole.positions[self.own]
        """``[tokens of this rank]`` int64: position of each in its sequence."""
        self.sequences = whole.sequences[self.own]
        """``[tokens of this rank]`` int64: the sequence of each."""

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
        """See `AttentionFn`; two collectives.

        Raises
        ------
        ValueError
            Heads cannot be distributed.
        """
        heads, key_heads, width = q.shape[1], k.shape[1], v.shape[2]
        if problem := heads_problem(heads, key_heads, self._ranks):
            raise ValueError(problem)
        repeats = math.lcm(key_heads, self._ranks) // key_heads
        parts = (q, k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1))
        # [tokens, ranks, numbers of a rank's heads], one collective for all three
        by_rank = [part.reshape(self._tokens, self._ranks, -1) for part in parts]
        mine = self._exchange(torch.cat(by_rank, -1).transpose(0, 1).flatten(0, 1))
        sizes = [part.shape[-1] for part in by_rank]
        shapes = [(part.shape[1] // self._ranks, part.shape[2]) for part in parts]
        split = torch.split(mine, sizes, dim=-1)
        q, k, v = (part.reshape(len(mine), *shape) for part, shape in zip(split, shapes, strict=True))
        if sinks is not None:
            # heads are distributed in runs; each rank's gradient is that of its own, and FSDP2 adds them up
            sinks = sinks.chunk(self._ranks)[dist.get_rank(self._group)]
        y = self._whole(layer, q, k, v, scale=scale, window=window, sinks=sinks)
        # rows of all tokens by rank are sent; received are this rank's tokens with each rank's heads in turn
        back = self._exchange(y.flatten(1))
        return back.view(self._ranks, self._tokens, -1).transpose(0, 1).reshape(self._tokens, heads, width)

    def _exchange(self, rows: Tensor) -> Tensor:
        equal = [self._tokens] * self._ranks
        return exchange_rows(rows, equal, equal, self._group)

    def choose(self, layer: int, index: IndexQuery, top_k: int, kernel: SparseKernel) -> Tensor:
        """See `SparseAttentionFn`: ``[tokens of this rank, width]`` indices into the tokens of the batch.

        ``index`` has queries and weights of this rank's tokens, and the keys of all.
        """
        return self._whole.choose_for(self.own, index, top_k, kernel)

    def attend(self, layer: int, inputs: Chosen, kernel: SparseKernel) -> Tensor:
        """See `SparseAttentionFn`; queries of ``inputs`` are of this rank's tokens, its rows of all in the batch."""
        return self._whole.attend(layer, inputs, kernel)

    def _gather(self, keys: Tensor, index_keys: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return gather_rows(keys, self._group, beside=index_keys)

    def context(self, select: Tensor | None = None, record: RoutedExpertsRecorder | None = None) -> BatchContext:
        """Return the context of a forward pass over this rank's tokens.

        ``select`` is ``[selected]`` int64, indices of this rank's tokens: see `BatchContext`.
        """
        return BatchContext(self.positions, self, select, record, sparse=self, gather=self._gather)
