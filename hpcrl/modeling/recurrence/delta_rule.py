"""The gated delta rule over packed sequences in plain torch, in chunks; its short convolution is that of Mamba-2.

The reference for kernels, and what CPUs compute. A head has a state ``S [key_dim, value_dim]`` that forgets a part of
itself and is then corrected towards the value of each key (Yang et al. 2024, "Gated Delta Networks", arXiv 2412.06464):
``S ← a S``, then ``S ← S + b k (v - kᵀ S)``, and a query reads ``qᵀ S``. The corrections of a chunk of tokens depend
on each other through a triangular system: its solution says what the tokens write as if the state before them were
zero, and what of that state they take away. Every sequence is cut into chunks of its own, so that no state reaches
over its ends. Some chunks are computed at a time, and again for the backward pass: nothing with an element for every
pair of tokens of a chunk is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hpcrl.modeling.recurrence.sequence_chunks import computed_again, sequence_chunks
from hpcrl.modeling.sums import running_sums

DELTA_CHUNK = 64
"""Tokens of a chunk, as in published kernels; no config names the number."""
_CHUNK_BYTES = 64 << 20
"""Approximate bytes of temporary memory for chunks."""
_NORM_EPS = 1e-6


class DeltaRule(NamedTuple):
    """Inputs of the delta rule.

    Attributes
    ----------
    queries, keys:
        ``[T, key heads, key_dim]``, before they are normalised to length 1; heads of values share them in groups.
    values:
        ``[T, heads, value_dim]``.
    decay:
        ``[T, heads]`` float32, the logarithm of the factor by which the state decays: at most 0.
    strength:
        ``[T, heads]`` float32: how far the state is corrected, from 0 to 1.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    decay: Tensor
    strength: Tensor


def delta_rule(
    parts: DeltaRule, starts: Sequence[int], chunk_size: int = DELTA_CHUNK, before: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return what the queries read from the state after each token, and the last states.

    Parameters
    ----------
    starts:
        Start of each of ``n`` sequences, and the end of the last.
    chunk_size:
        Maximum tokens of a chunk.
    before:
        ``[n, heads, key_dim, value_dim]`` float32: states before the tokens; None for zeros.

    Returns
    -------
    tuple
        ``[T, heads, value_dim]`` float32, and the states after the last tokens, as ``before``.
    """
    chunks = sequence_chunks(tuple(starts), chunk_size, parts.values.device)
    heads, dim = parts.values.shape[1:]
    size, width = chunks.tokens.shape[1], parts.keys.shape[2]
    # padding neither decays the state nor corrects it
    real = chunks.real[..., None]
    queries, keys, values = (chunks.cut(part) for part in (parts.queries, parts.keys, parts.values))
    cut_parts = DeltaRule(queries, keys, values, chunks.cut(parts.decay) * real, chunks.cut(parts.strength) * real)
    # at a time: decays, products and the triangular system of all pairs of a chunk, for each head
    together = max(1, _CHUNK_BYTES // (16 * heads * size * max(size, width, dim)))
    pieces = [DeltaRule(*own) for own in zip(*(torch.split(part, together) for part in cut_parts), strict=True)]
    solved = [computed_again(_solved, piece) for piece in pieces]
    writes = _Writes(*(torch.cat(own) for own in zip(*solved, strict=True)))
    state = writes.values.new_zeros(len(starts) - 1, heads, width, dim) if before is None else before
    entering, corrections, after = _states(state[chunks.order], writes, chunks.counts)
    each = zip(pieces, torch.split(entering, together), torch.split(corrections, together), strict=True)
    y = torch.cat([computed_again(_read, *own) for own in each])
    return y.flatten(0, 1)[chunks.places], after[chunks.back]


class _Writes(NamedTuple):
    """Updates that ``c`` chunks make to the state before them; heads come before tokens.

    Attributes
    ----------
    values, takes:
        ``[c, heads, size, value_dim]``: corrections if that state is zero. ``[c, heads, size, key_dim]``: its product
        with that state is subtracted from them.
    keys:
        ``[c, heads, size, key_dim]``: keys under which corrections are stored, decayed to the end of the chunk.
    kept:
        ``[c, heads]``: factor by which the state decays.
    """

    values: Tensor
    takes: Tensor
    keys: Tensor
    kept: Tensor


def _solved(parts: DeltaRule) -> _Writes:
    """Solve the triangular systems of chunks ``[c, size, …]``."""
    heads, dim = parts.values.shape[2:]
    keys, logs = _by_head(_unit(parts.keys), heads), running_sums(parts.decay).transpose(1, 2)
    strength = parts.strength.transpose(1, 2)[..., None]
    values = _by_head(parts.values.float(), heads) * strength
    system = (keys * strength) @ keys.transpose(-1, -2) * _between(logs)
    right = torch.cat((values, keys * strength * logs.exp()[..., None]), dim=-1)
    # unitriangular: the diagonal counts as ones, whatever is stored there
    solution = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    left = (logs[..., -1:] - logs).exp()
    return _Writes(solution[..., :dim], solution[..., dim:], keys * left[..., None], logs[..., -1].exp())


def _states(state: Tensor, writes: _Writes, counts: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return states before each chunk, each chunk's corrections, and states after each sequence's last chunk.

    Sequences come by falling number of chunks.
    """
    entering, corrections, finished, begin = [], [], [], 0
    for count, following in zip(counts, [*counts[1:], 0], strict=True):
        state = state[:count]
        entering.append(state)
        own = slice(begin, begin + count)
        written = writes.values[own] - writes.takes[own] @ state
        corrections.append(written)
        state = state * writes.kept[own, :, None, None] + writes.keys[own].transpose(-1, -2) @ written
        finished.append(state[following:])
        begin += count
    return torch.cat(entering), torch.cat(corrections), torch.cat(finished[::-1])


def _read(parts: DeltaRule, entering: Tensor, corrections: Tensor) -> Tensor:
    """Return what queries of chunks ``[c, size, …]`` read from their chunk up to them, and from the entering state."""
    heads, width = parts.values.shape[2], parts.keys.shape[3]
    keys, queries = _by_head(_unit(parts.keys), heads), _by_head(_unit(parts.queries) * width**-0.5, heads)
    logs = running_sums(parts.decay).transpose(1, 2)
    inside = (queries @ keys.transpose(-1, -2) * _between(logs)) @ corrections
    return (inside + queries * logs.exp()[..., None] @ entering).transpose(1, 2)


def _between(logs: Tensor) -> Tensor:
    """Return the decay from each writer to each later reader in a chunk, ``[c, heads, readers, writers]``."""
    size = logs.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=logs.device).triu(1)
    return (logs[..., :, None] - logs[..., None, :]).masked_fill(later, float("-inf")).exp()


def _unit(x: Tensor) -> Tensor:
    """Return ``[…, width]`` in float32, normalised to length 1."""
    wide = x.float()
    return wide * (wide.square().sum(-1, keepdim=True) + _NORM_EPS).rsqrt()


def _by_head(x: Tensor, heads: int) -> Tensor:
    """Permute ``[c, size, heads or groups of them, width]`` to ``[c, heads, size, width]``."""
    return x.transpose(1, 2).repeat_interleave(heads // x.shape[2], dim=1)
