"""Packed sequences cut into chunks, for recurrences that are computed as attention within a chunk of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hpcrl.modeling.memory.transfer import kept_for_layers, to_device

T = TypeVar("T")


class SequenceChunks(NamedTuple):
    """Tokens of packed sequences in chunks: first chunks of all sequences, longer ones first, then second ones.

    Attributes
    ----------
    counts:
        Number of sequences with a first chunk, with a second one, ….
    order, back:
        ``[n]``: sequences by falling number of chunks, and where each sequence is among these.
    tokens, real:
        ``[chunks, size]``: tokens of each chunk, and which of them are no padding.
    places:
        ``[T]``: where each token is among those of all chunks.
    """

    counts: list[int]
    order: Tensor
    back: Tensor
    tokens: Tensor
    real: Tensor
    places: Tensor

    def cut(self, x: Tensor) -> Tensor:
        """Split ``[T, …]`` into ``[chunks, size, …]``; padding repeats the last token of its sequence."""
        return x[self.tokens.flatten()].view(*self.tokens.shape, *x.shape[1:])


@kept_for_layers(2)
def sequence_chunks(starts: tuple[int, ...], chunk_size: int, device: torch.device) -> SequenceChunks:
    """Cut the sequences that begin at ``starts``, ``[n + 1]``, into chunks of ``chunk_size`` tokens at most."""
    bounds = np.asarray(starts)
    lengths = np.diff(bounds)
    size = min(chunk_size, int(lengths.max(initial=1)))
    numbers = -(-lengths // size)
    order = np.argsort(-numbers, kind="stable")
    counts = [int((numbers > rank).sum()) for rank in range(int(numbers.max(initial=0)))]
    sequence = np.concatenate([order[:count] for count in counts])
    rank = np.repeat(np.arange(len(counts)), counts)
    wanted = (bounds[sequence] + rank * size)[:, None] + np.arange(size)
    ends = bounds[sequence + 1][:, None]
    real = wanted < ends
    places = np.empty(int(bounds[-1]), np.int64)
    places[wanted[real]] = np.flatnonzero(real)
    on_host = (order, np.argsort(order), np.minimum(wanted, ends - 1), real, places)
    return SequenceChunks(counts, *to_device([torch.from_numpy(numbers) for numbers in on_host], device))


def computed_again(function: Callable[..., T], *arguments: object) -> T:
    """Return the result of ``function``; intermediate tensors are recomputed in the backward pass and not kept."""
    if not torch.is_grad_enabled():
        return function(*arguments)
    made: T = checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
    return made
