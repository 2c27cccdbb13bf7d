"""Interface of a kernel of dense attention, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class QueryRange(NamedTuple):
    """A run of queries, and the keys that belong to it."""

    queries: slice
    keys: slice


@dataclass(frozen=True)
class Segments:
    """Segments of flat queries and keys: each query sees only keys of its own segment.

    Attributes
    ----------
    queries, keys:
        Start of each segment among flat queries and keys, and the end of the last: ``[n + 1]``. A segment may be empty.
    causal:
        Whether a query sees no later key; queries and keys are then the same tokens.
    window:
        Number of last keys, up to itself, that a query sees; None for all. Only causal segments have a window.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    causal: bool
    window: int | None = None

    def __post_init__(self) -> None:
        assert len(self.queries) == len(self.keys)
        assert not self.causal or self.queries == self.keys
        assert self.window is None or (self.causal and self.window > 0)

    def __iter__(self) -> Iterator[QueryRange]:
        """Yield the segments in which there is something to compute."""
        for (begin, end), (first, last) in zip(pairwise(self.queries), pairwise(self.keys), strict=True):
            if begin < end and first < last:
                yield QueryRange(slice(begin, end), slice(first, last))


class QKV(NamedTuple):
    """Queries ``[Q, heads, key_dim]``, keys ``[K, key_heads, key_dim]`` and values ``[K, key_heads, value_dim]``.

    ``heads`` is a multiple of ``key_heads``. Or their gradients.
    """

    q: Tensor
    k: Tensor
    v: Tensor


class Attended(NamedTuple):
    """The output of attention, and what its backward pass needs.

    Attributes
    ----------
    out:
        ``[Q, heads, value_dim]``; 0 where a query sees no key.
    lse:
        ``[Q, heads]`` in `score_dtype`: the logarithm of the sum of exponentials of its scores; minus infinity where it
        sees no key.
    """

    out: Tensor
    lse: Tensor


class Kernel(Protocol):
    """Attention of each query over the keys of its segment."""

    name: str

    def forward(self, inputs: QKV, segments: Segments, scale: float) -> Attended:
        """Compute attention; ``scale`` multiplies the scores."""
        ...

    def backward(self, grad: Tensor, inputs: QKV, attended: Attended, segments: Segments, scale: float) -> QKV:
        """Return gradients of ``inputs``, in their shapes, for the output's gradient ``grad [Q, heads, value_dim]``.

        ``attended`` may be of a softmax over more than the keys that are here (keys of other ranks, sinks): a weight is
        ``exp(score - lse)``, and its gradient depends on the output alone otherwise. What is returned is then the part
        of these keys.
        """
        ...


def score_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which scores of activations of ``dtype`` are summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32
