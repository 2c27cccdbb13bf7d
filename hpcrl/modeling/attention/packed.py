"""Causal attention inside each of several concatenated sequences."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from hpcrl.modeling.attention.sparse import attend_chosen, choose_tokens
from hpcrl.modeling.context import BatchContext, IndexQuery, RoutedExpertsRecorder
from hpcrl.modeling.kernels.attend import attend
from hpcrl.modeling.kernels.kernel import QKV, Segments
from hpcrl.modeling.memory.transfer import movable
from hpcrl.modeling.recurrence.delta_rule import DeltaRule, delta_rule
from hpcrl.modeling.recurrence.state_space import Scan, convolve, scan
from hpcrl.modeling.sparse_kernels.kernel import Chosen, SparseKernel


@movable
class PackedAttention:
    """An `hpcrl.modeling.context.AttentionFn` and `SparseAttentionFn` for packed batches.

    Nothing is padded: the result, and what it takes of time and memory, is that of a loop over sequences.
    """

    def __init__(self, cu_seqlens: Tensor) -> None:
        """Find each token's place, on the host; `hpcrl.modeling.memory.transfer.move` brings it to a device.

        Parameters
        ----------
        cu_seqlens:
            ``[n + 1]`` int64 on the host: start of each sequence and the end of the last.
        """
        lengths = cu_seqlens.diff()
        self._longest = int(lengths.max()) if len(lengths) else 0
        sequence = torch.repeat_interleave(lengths)
        self.sequences = sequence
        """``[tokens]`` int64: the sequence of each token."""
        self.positions = torch.arange(len(sequence)) - cu_seqlens[:-1][sequence]
        """``[tokens]`` int64: position of each token in its sequence."""
        self.starts: tuple[int, ...] = tuple(cu_seqlens.tolist())
        """Start of each sequence and the end of the last: numbers of the host wherever the tensors are."""

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
        """See `AttentionFn`; ``layer`` is not used because nothing is cached."""
        segments = Segments(self.starts, self.starts, causal=True, window=window)
        return attend(QKV(q, k, v), segments, scale=scale, sinks=sinks)

    def choose(self, layer: int, index: IndexQuery, top_k: int, kernel: SparseKernel) -> Tensor:
        """See `SparseAttentionFn`: indices into the flat tokens, ``[T, min(top_k, longest)]``."""
        return self.choose_for(slice(0, len(self.positions)), index, top_k, kernel)

    def choose_for(self, own: slice, index: IndexQuery, top_k: int, kernel: SparseKernel) -> Tensor:
        """`choose` for the queries of some tokens, ``own``: ``index`` has their queries and weights, and all keys.

        Returns
        -------
        Tensor
            ``[len(own), min(top_k, longest)]`` int32: indices into all flat tokens; -1 where a query sees fewer.
        """
        chosen = index.k.new_full((len(index.q), min(top_k, self._longest)), -1, dtype=torch.int32)
        for begin, end in pairwise(self.starts):
            first, last = max(begin, own.start), min(end, own.stop)
            if first >= last:
                continue
            here = slice(first - own.start, last - own.start)
            visible = self.positions[first:last] + 1
            best = choose_tokens(index.q[here], index.k[begin:last], index.weights[here], visible, top_k, kernel=kernel)
            chosen[here, : best.shape[1]] = torch.where(best < 0, best, best + begin)
        return chosen

    def attend(self, layer: int, inputs: Chosen, kernel: SparseKernel) -> Tensor:
        """See `SparseAttentionFn`; ``layer`` is not used because nothing is cached."""
        return attend_chosen(inputs, kernel)

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `RecurrenceFn`; ``layer`` is not used because nothing is kept."""
        return convolve(x, weight, bias, self.starts)[0]

    def scan(self, layer: int, parts: Scan, chunk_size: int) -> Tensor:
        """See `RecurrenceFn`; ``layer`` is not used because nothing is kept."""
        return scan(parts, self.starts, chunk_size)[0]

    def delta_rule(self, layer: int, parts: DeltaRule) -> Tensor:
        """See `RecurrenceFn`; ``layer`` is not used because nothing is kept."""
        return delta_rule(parts, self.starts)[0]

    def context(self, select: Tensor | None = None, record: RoutedExpertsRecorder | None = None) -> BatchContext:
        """Return the context of a forward pass over these sequences.

        ``select`` is ``[selected]`` int64, indices of flat tokens: see `BatchContext`.
        """
        return BatchContext(self.positions, self, select, record, sparse=self, recurrence=self)
