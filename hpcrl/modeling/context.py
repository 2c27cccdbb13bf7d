"""Context of a forward pass: its inputs besides the tokens, in one object that goes through all layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hpcrl.modeling.recurrence.delta_rule import DeltaRule
from hpcrl.modeling.recurrence.state_space import Scan
from hpcrl.modeling.sparse_kernels.kernel import Chosen, SparseKernel


class AttentionFn(Protocol):
    """Causal attention over flat tokens; owns sequence boundaries and any KV cache."""

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
        """Compute attention.

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
            Factor of the scores; None for ``key_dim ** -0.5``.
        window:
            Number of last tokens that a query sees, itself included; None: all tokens before it.
        sinks:
            ``[query_heads]``: a score that takes part in each softmax of a head and has no value; None: there is none.

        Returns
        -------
        Tensor
            ``[tokens, query_heads, value_dim]``.
        """
        ...


class IndexQuery(NamedTuple):
    """Output of an indexer for ``T`` tokens: ``q [T, heads, dim]``, ``k [T, dim]`` and ``weights [T, heads]``."""

    q: Tensor
    k: Tensor
    weights: Tensor


class SparseAttentionFn(Protocol):
    """Causal attention of which each query sees chosen tokens alone; owns sequence boundaries and any KV cache."""

    def choose(self, layer: int, index: IndexQuery, top_k: int, kernel: SparseKernel) -> Tensor:
        """Choose at most ``top_k`` tokens of its sequence for each query; ``kernel`` computes scores.

        Returns
        -------
        Tensor
            ``[T, width]`` int32, for `attend` of the same layer and of others that share the choice.
        """
        ...

    def attend(self, layer: int, inputs: Chosen, kernel: SparseKernel) -> Tensor:
        """Compute attention over chosen tokens.

        Parameters
        ----------
        inputs:
            Queries ``[T, query_heads, key_dim]``, one key ``[T, key_dim]`` a token, and what `choose` has chosen.
        kernel:
            Kernel that computes it.

        Returns
        -------
        Tensor
            ``[T, query_heads, value_dim]``.
        """
        ...


class LatentAttentionFn(Protocol):
    """Causal attention that makes keys and values of latents itself, where ranks share a batch."""

    def attend_latents(self, layer: int, q: Tensor, latents: Tensor, expand: Tensor, *, scale: float) -> Tensor:
        """Compute attention over latents.

        Parameters
        ----------
        layer:
            Global layer number.
        q:
            ``[T, heads, key_dim]``, of which the last ``rotary_dim`` channels are rotated.
        latents:
            ``[T, latent_dim + rotary_dim]``: the normalised latent of each token, and the rotated key of all heads.
        expand:
            ``[heads * (key_dim - rotary_dim + value_dim), latent_dim]``: makes the other channels of a head's key, and
            its value, of a latent.
        scale:
            Factor of the scores.

        Returns
        -------
        Tensor
            ``[T, heads, value_dim]``.
        """
        ...


class RecurrenceFn(Protocol):
    """Recurrence over sequences for recurrent layers; owns sequence boundaries and any state that an engine keeps."""

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Apply `hpcrl.modeling.recurrence.state_space.convolve` to ``[T, channels]``; the shape stays."""
        ...

    def scan(self, layer: int, parts: Scan, chunk_size: int) -> Tensor:
        """Return the result of `hpcrl.modeling.recurrence.state_space.scan`: ``[T, heads, head_dim]`` float32."""
        ...

    def delta_rule(self, layer: int, parts: DeltaRule) -> Tensor:
        """Return the result of `hpcrl.modeling.recurrence.delta_rule.delta_rule`: ``[T, heads, value_dim]`` float32."""
        ...


GatherFn = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]
"""See `BatchContext`."""


class RoutedExpertsRecorder(Protocol):
    """Receives the experts chosen by each sparse layer."""

    def __call__(self, layer: int, experts: Tensor) -> None:
        """Take the router's own choice.

        ``experts`` is ``[tokens, experts_per_token]``, int64, ordered by falling preference; also where a replay puts
        other experts in its place.
        """
        ...


class ReplayedExperts(NamedTuple):
    """Experts that engines chose for ``T`` tokens.

    Attributes
    ----------
    experts:
        ``[T, sparse layers, experts_per_token]``: uint8, int16 or int32, the smallest that is exact. Means nothing
        where ``known`` is False.
    known:
        ``[T]`` bool: whether an engine reported experts. The last token of a rollout never went into an engine.
    columns:
        Index of a sparse layer in ``experts``, by global layer number. Layers without experts have none.
    """

    experts: Tensor
    known: Tensor
    columns: Mapping[int, int]

    def of(self, layer: int) -> Tensor:
        """Return ``[T, experts_per_token]`` of a sparse layer, by global number."""
        return self.experts[:, self.columns[layer]]

    def instead_of(self, own: Tensor, layer: int) -> Tensor:
        """Return ``own [T, experts_per_token]`` int64 with the engines' experts in all known rows."""
        return torch.where(self.known[:, None], self.of(layer).to(own.dtype), own)


@dataclass(frozen=True, slots=True)
class BatchContext:
    """Inputs of one forward pass over ``T`` flat tokens, besides the tokens; sequences are concatenated.

    Attributes
    ----------
    positions:
        ``[T]`` int64; they restart at each sequence.
    attention:
        Attention function; it knows the start of each sequence.
    select:
        ``[selected]`` indices of the tokens whose logits are needed; None for all.
    record:
        Receives the experts that the router of every sparse layer chooses itself.
    sparse:
        The same attention for layers that choose tokens; None if it does not support them.
    latent:
        The same attention for layers with latents; None if it needs the keys and values of heads.
    recurrence:
        Function for layers with a state; None if there is none.
    gather:
        If ranks share a batch: gathers this rank's rows into rows of all tokens, for ``sparse``. It takes two tensors
        ``[T, …]`` in one collective; the second one has no gradient and may be None. None: all tokens are on this rank.
    chosen:
        Tokens that each layer with an indexer chose, for later layers that share the choice. It is kept by layer: a
        layer that is recomputed in the backward pass must find what it found in the forward pass.
    replay:
        Experts that routers take instead of their own choice, in the rows that are known; None: their own everywhere.
    taken:
        Experts ``[T, k]`` that tokens were sent to, by layer, if layers are computed twice: the first computation
        stores them and the second one reads them. None: no layer is computed twice.
    """

    positions: Tensor
    attention: AttentionFn
    select: Tensor | None = None
    record: RoutedExpertsRecorder | None = None
    sparse: SparseAttentionFn | None = None
    latent: LatentAttentionFn | None = None
    recurrence: RecurrenceFn | None = None
    gather: GatherFn | None = None
    chosen: dict[int, Tensor] = field(default_factory=dict)
    replay: ReplayedExperts | None = None
    taken: dict[int, Tensor] | None = None
