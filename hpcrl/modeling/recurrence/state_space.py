"""Mamba-2 over packed sequences in plain torch: a short causal convolution, and the recurrence of its state in chunks.

The reference for kernels, and what CPUs compute. Within a chunk of tokens the recurrence is computed as attention is,
from chunk to chunk by a state of fixed size (Dao and Gu 2024, "Transformers are SSMs", section 6). Every sequence is
cut into chunks of its own, so that no state and no convolution reaches over its ends. Some chunks are computed at a
time, and again for the backward pass: nothing with an element for every pair of tokens of a chunk is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hpcrl.modeling.memory.transfer import kept_for_layers, to_device
from hpcrl.modeling.recurrence.sequence_chunks import computed_again, sequence_chunks
from hpcrl.modeling.sums import running_sums

_CHUNK_BYTES = 64 << 20
"""Approximate bytes of temporary memory for chunks."""


class Scan(NamedTuple):
    """Inputs of a recurrence ``state = exp(step · decay) · state + step · value ⊗ key`` that queries read.

    Attributes
    ----------
    values:
        ``[T, heads, head_dim]``.
    steps:
        ``[T, heads]`` float32, above 0.
    decay:
        ``[heads]`` float32, below 0.
    keys, queries:
        ``[T, groups, state_size]``: keys under which values are written to the state, and queries that read it; heads
        share them in groups.
    """

    values: Tensor
    steps: Tensor
    decay: Tensor
    keys: Tensor
    queries: Tensor


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, starts: Sequence[int], before: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Apply a causal convolution to each channel by itself, within each sequence.

    Parameters
    ----------
    x:
        ``[T, channels]``.
    weight, bias:
        ``[channels, 1, width]`` and ``[channels]``.
    starts:
        Start of each of ``n`` sequences, and the end of the last.
    before:
        ``[n, width - 1, channels]``: what was there before the tokens; None for nothing (zeros).

    Returns
    -------
    tuple
        ``[T, channels]``, and ``[n, width - 1, channels]``: the last inputs, for the next call.
    """
    n, reach = len(starts) - 1, weight.shape[2] - 1
    places, heads, tails = _inputs(tuple(starts), reach, x.device)
    wide = x.new_zeros(len(x) + n * reach, x.shape[1]).index_copy(0, places, x)
    if before is not None:
        wide = wide.index_copy(0, heads, before.flatten(0, 1).to(x.dtype))
    y = F.conv1d(wide.T[None], weight, bias, groups=x.shape[1])[0].T
    return y[places - reach], wide[tails].view(n, reach, x.shape[1])


@kept_for_layers(2)
def _inputs(starts: tuple[int, ...], reach: int, device: torch.device) -> list[Tensor]:
    """Return indices into the inputs with ``reach`` earlier ones before each sequence.

    They are those of the tokens, of the earlier inputs, and of the last ``reach`` inputs of each sequence.
    """
    bounds = np.asarray(starts)
    n = len(bounds) - 1
    shifts = np.repeat(np.arange(1, n + 1) * reach, np.diff(bounds))
    places = np.arange(bounds[-1]) + shifts
    heads = ((bounds[:-1] + np.arange(n) * reach)[:, None] + np.arange(reach)).ravel()
    tails = ((bounds[1:] + np.arange(n) * reach)[:, None] + np.arange(reach)).ravel()
    return to_device([torch.from_numpy(numbers) for numbers in (places, heads, tails)], device)


def scan(parts: Scan, starts: Sequence[int], chunk_size: int, before: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return what the queries read from the state after each token, and the last states.

    Parameters
    ----------
    starts:
        Start of each of ``n`` sequences, and the end of the last.
    chunk_size:
        Maximum tokens of a chunk.
    before:
        ``[n, heads, head_dim, state_size]`` float32: states before the tokens; None for zeros.

    Returns
    -------
    tuple
        ``[T, heads, head_dim]`` float32, and the states after the last tokens, as ``before``.
    """
    chunks = sequence_chunks(tuple(starts), chunk_size, parts.values.device)
    heads, dim = parts.values.shape[1:]
    shape, cut = chunks.tokens.shape, chunks.cut
    # a step of 0 neither decays the state nor adds to it
    steps = cut(parts.steps) * chunks.real[..., None]
    cut_parts = Scan(cut(parts.values), steps, parts.decay, cut(parts.keys), cut(parts.queries))
    # at a time: decays and products of all pairs of a chunk, for each head
    together = max(1, _CHUNK_BYTES // (12 * heads * shape[1] * max(shape[1], parts.keys.shape[2])))
    pieces = _split(cut_parts, together)
    made = [computed_again(_written, piece) for piece in pieces]
    written, kept = torch.cat([w for w, _ in made]), torch.cat([k for _, k in made])
    state = written.new_zeros(len(starts) - 1, heads, dim, parts.keys.shape[2]) if before is None else before
    entering, after = _states(state[chunks.order], written, kept, chunks.counts)
    each = torch.split(entering, together)
    y = torch.cat([computed_again(_read, piece, states) for piece, states in zip(pieces, each, strict=True)])
    return y.flatten(0, 1)[chunks.places], after[chunks.back]


def _split(parts: Scan, together: int) -> list[Scan]:
    """Split the chunks into groups of ``together``."""
    values, steps, keys, queries = (
        torch.split(part, together) for part in (parts.values, parts.steps, parts.keys, parts.queries)
    )
    return [Scan(v, s, parts.decay, k, q) for v, s, k, q in zip(values, steps, keys, queries, strict=True)]


def _written(parts: Scan) -> tuple[Tensor, Tensor]:
    """Return the chunks' additions ``[c, heads, dim, state]`` to the state, and its decay ``[c, heads]``.

    ``parts`` are those of chunks ``[c, size, …]``.
    """
    logs = running_sums(parts.steps * parts.decay)
    left = (logs[:, -1:] - logs).exp() * parts.steps
    weighted = _by_group(parts.values.float() * left[..., None], parts.keys.shape[2], 2)
    added = torch.einsum("cqgrp,cqgn->cgrpn", weighted, parts.keys.float())
    return added.flatten(1, 2), logs[:, -1].exp()


def _states(state: Tensor, written: Tensor, kept: Tensor, counts: list[int]) -> tuple[Tensor, Tensor]:
    """Return states before each chunk and after each sequence's last; sequences by falling number of chunks."""
    entering, finished, begin = [], [], 0
    for count, following in zip(counts, [*counts[1:], 0], strict=True):
        state = state[:count]
        entering.append(state)
        own = slice(begin, begin + count)
        state = state * kept[own, :, None, None] + written[own]
        finished.append(state[following:])
        begin += count
    return torch.cat(entering), torch.cat(finished[::-1])


def _read(parts: Scan, entering: Tensor) -> Tensor:
    """Return what queries of chunks ``[c, size, …]`` read from their chunk up to them, and from the entering state."""
    size, groups = parts.values.shape[1], parts.keys.shape[2]
    keys, queries = parts.keys.float(), parts.queries.float()
    logs = running_sums(parts.steps * parts.decay)
    later = torch.ones(size, size, dtype=torch.bool, device=keys.device).triu(1)
    # [chunks, reader, writer, heads]
    between = (logs[:, :, None] - logs[:, None]).masked_fill(later[..., None], float("-inf")).exp()
    met = torch.einsum("cqgn,ckgn->cqkg", queries, keys)
    weights = (_by_group(between, groups, 3) * met[..., None]).flatten(3)
    inside = torch.einsum("cqkh,ckhp->cqhp", weights, parts.values.float() * parts.steps[..., None])
    of_state = torch.einsum("cqgn,cgrpn->cqgrp", queries, _by_group(entering, groups, 1))
    return inside + of_state.flatten(2, 3) * logs.exp()[..., None]


def _by_group(x: Tensor, groups: int, dim: int) -> Tensor:
    """Return a view with the heads of dimension ``dim`` as groups and heads per group."""
    return x.view(*x.shape[:dim], groups, -1, *x.shape[dim + 1 :])
