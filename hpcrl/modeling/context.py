"""What a forward pass needs beside its tokens, in one object that travels through all layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

__all__ = ["AttentionFn", "BatchContext", "RoutedExpertsRecorder"]


class AttentionFn(Protocol):
    """Causal attention over flat tokens; owns sequence boundaries and any KV cache."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
        """Attend.

        Parameters
        ----------
        layer:
            Global layer number.
        q:
            ``[tokens, query_heads, key_dim]``, rotated.
        k:
            ``[tokens, key_heads, key_dim]``, rotated; ``query_heads`` is a multiple of ``key_heads``.
        v:
            ``[tokens, key_heads, value_dim]``.
        scale:
            Of the scores; None for ``key_dim ** -0.5``.

        Returns
        -------
        Tensor
            ``[tokens, query_heads, value_dim]``.
        """
        ...


class RoutedExpertsRecorder(Protocol):
    """Receives the experts chosen by each sparse layer."""

    def __call__(self, layer: int, experts: Tensor) -> None:
        """``experts`` is ``[tokens, experts_per_token]``, int64, ordered by falling preference of the router."""
        ...


@dataclass(frozen=True, slots=True)
class BatchContext:
    """Of one forward pass over ``T`` flat tokens: several sequences lie one behind the other.

    Attributes
    ----------
    positions:
        ``[T]`` int64; they restart at each sequence.
    attention:
        Knows where each sequence begins.
    select:
        ``[selected]`` indices of the tokens whose logits are wanted; None for all.
    record:
        Told the chosen experts of every sparse layer.
    """

    positions: Tensor
    attention: AttentionFn
    select: Tensor | None = None
    record: RoutedExpertsRecorder | None = None
