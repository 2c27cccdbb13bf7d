"""Interface of a kernel of sparse attention."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hpcrl.modeling.kernels.kernel import Attended


class Chosen(NamedTuple):
    """Queries, and the rows that they attend to.

    Attributes
    ----------
    q:
        ``[T, heads, dim]``.
    rows:
        ``[S, dim]``: a key for all heads; its first ``value_dim`` channels are the value.
    chosen:
        ``[T, width]`` int32: indices of rows, none twice; -1 for none.
    value_dim, scale:
        Channels of a value, and what scores are multiplied with.
    """

    q: Tensor
    rows: Tensor
    chosen: Tensor
    value_dim: int
    scale: float

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.rows, self.chosen


class SparseShape(NamedTuple):
    """Sizes of a model's sparse attention, and the dtype that it computes in.

    Attributes
    ----------
    heads, dim, value_dim, width:
        Sizes of `Chosen`; ``width`` is a maximum.
    index_heads, index_dim:
        Sizes of the indexer.
    """

    heads: int
    dim: int
    value_dim: int
    width: int
    index_heads: int
    index_dim: int
    dtype: torch.dtype


class SparseKernel(Protocol):
    """Attention of queries over rows that they chose, and the scores by which they choose."""

    name: str
    deterministic: bool
    """Whether it gives the same numbers each time."""

    def rows_at_once(self, heads: int, keys: int) -> int:
        """Return the number of queries to pass to one call of `index_scores`, for this number of heads and keys."""
        ...

    def forward(self, inputs: Chosen) -> Attended:
        """Return ``out [T, heads, value_dim]``, and ``lse [T, heads]`` float32."""
        ...

    def backward(self, grad: Tensor, inputs: Chosen, attended: Attended) -> tuple[Tensor, Tensor]:
        """Return gradients of ``q`` and ``rows``, in their shapes, for ``grad [T, heads, value_dim]`` of ``out``."""
        ...

    def index_scores(self, q: Tensor, k: Tensor, weights: Tensor, visible: Tensor) -> Tensor:
        """Return the sum over heads of ``weight · relu(q · k)`` (DeepSeek-V3.2, arXiv 2512.02556, equation 1).

        ``q [T, heads, dim]``, ``k [S, dim]`` and ``weights [T, heads]`` give ``[T, S]`` float32. A query sees the first
        ``visible [T]`` (int64) keys; the score of all others is -inf.
        """
        ...
