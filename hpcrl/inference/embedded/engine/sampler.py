"""Sampling of a whole batch at once, with noise that depends on each sequence alone.

The order of operations is vLLM's: suppressed tokens, greedy choice, temperature, min-p, top-k and top-p, random
choice. Random choice is by exponential races (the Gumbel-max method): each token draws an exponential
waiting time of rate p and the first wins. The draws come from a counter-based generator keyed by the
sequence's seed and the position, so neither other sequences in the batch nor an interruption changes them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Parameters of ``n`` sequences, arrays ``[n]`` as in `hpcrl.inference.embedded.engine.rows.Rows`.

    ``positions`` is the position of the token that is sampled; ``suppressed`` lists, by index, sequences with
    tokens that must not come yet.
    """

    temperature: NDArray[np.float32]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    seed: NDArray[np.int64]
    positions: NDArray[np.int64]
    suppressed: list[tuple[int, list[int]]]
    wants_logprobs: bool
    num_top: int


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Results ``[n]``; ``top_ids`` and ``top_logprobs`` are ``[n, num_top]``."""

    token_ids: NDArray[np.int64]
    logprobs: NDArray[np.float32] | None
    ranks: NDArray[np.int64] | None
    top_ids: NDArray[np.int64] | None
    top_logprobs: NDArray[np.float32] | None


class TokenSampler:
    """Samples from logits ``[n, vocab_size]``."""

    def __init__(self, vocab_size: int, logprobs_mode: str) -> None:
        """Prepare for a vocabulary.

        Parameters
        ----------
        vocab_size:
            Width of the logits.
        logprobs_mode:
            ``raw_logprobs`` (of the model's own distribution) or ``processed_logprobs`` (of the distribution that was
            sampled from: after temperature, min-p, top-k and top-p).
        """
        assert logprobs_mode in LOGPROBS_MODES
        self._raw = logprobs_mode == "raw_logprobs"
        self._vocab_size = vocab_size
        self._token_keys = _mix(torch.arange(vocab_size, dtype=torch.int64) * _GOLDEN)

    def __call__(self, logits: Tensor, batch: SamplingBatch) -> SampledTokens:
        """Sample one token of each sequence.

        Parameters
        ----------
        logits:
            ``[n, vocab_size]`` float32; overwritten.
        batch:
            Parameters of the ``n`` sequences.
        """
        greedy = batch.temperature == 0.0
        logprobs = logits.log_softmax(-1) if batch.wants_logprobs and self._raw else None
        for index, not_yet in batch.suppressed:
            # an end of sequence of the model's config may be outside of its vocabulary
            logits[index, [token for token in not_yet if 0 <= token < self._vocab_size]] = -torch.inf
        choice: Tensor | None = logits.argmax(-1) if greedy.any() else None
        if not greedy.all():
            if (batch.temperature != 1.0).any():
                scale = torch.from_numpy(np.where(greedy, np.float32(1.0), batch.temperature))
                logits.div_(scale[:, None])
            self._restrict(logits, batch)
            race = logits.log_softmax(-1)
            if batch.wants_logprobs and not self._raw:
                logprobs = race.clone()
            winner = (race - self._log_waiting_times(batch.seed, batch.positions)).argmax(-1)
            choice = winner if choice is None else torch.where(torch.from_numpy(greedy), choice, winner)
        elif batch.wants_logprobs and not self._raw:
            logprobs = logits.log_softmax(-1)
        assert choice is not None
        token_ids: NDArray[np.int64] = choice.numpy()
        if logprobs is None:
            return SampledTokens(token_ids, None, None, None, None)
        chosen, ranks, top_ids, top_logprobs = rank_and_top(logprobs, choice, batch.num_top)
        return SampledTokens(token_ids, chosen, ranks, top_ids, top_logprobs)

    def _restrict(self, logits: Tensor, batch: SamplingBatch) -> None:
        """Set logits outside of min-p, top-k and top-p to minus infinity, in place."""
        if batch.min_p.any():
            # p >= min_p * max(p)  <=>  logit >= max(logit) + log(min_p)
            with np.errstate(divide="ignore"):
                floor = torch.from_numpy(np.log(batch.min_p))
            logits.masked_fill_(logits < logits.amax(-1, keepdim=True) + floor[:, None], -torch.inf)
        limited_k = bool((batch.top_k < self._vocab_size).any())
        limited_p = bool((batch.top_p < 1.0).any())
        if not (limited_k or limited_p):
            return
        ordered, index = logits.sort(-1)
        if limited_k:
            kept = torch.from_numpy(np.minimum(batch.top_k, self._vocab_size))
            threshold = ordered.gather(1, self._vocab_size - kept[:, None])
            ordered.masked_fill_(ordered < threshold, -torch.inf)
        if limited_p:
            top_p = torch.from_numpy(batch.top_p)[:, None]
            # with ``top_p`` 1 all tokens stay, even if their probability is rounded to 0
            outside = (ordered.softmax(-1).cumsum(-1) <= 1 - top_p) & (top_p < 1)
            outside[:, -1] = False
            ordered.masked_fill_(outside, -torch.inf)
        logits.scatter_(-1, index, ordered)

    def _log_waiting_times(self, seed: NDArray[np.int64], positions: NDArray[np.int64]) -> Tensor:
        """Return logarithms of standard exponential draws, ``[n, vocab_size]``."""
        keys = _mix(_mix(torch.from_numpy(seed)) + torch.from_numpy(positions) * _GOLDEN)
        times = torch.empty(len(keys), self._vocab_size)
        # a few rows at a time, in place: all at once are copied through main memory twenty times, which took as long as
        # the forward pass of a model of 135 million parameters with 49,152 tokens
        rows = max(1, _DRAWN_AT_ONCE // self._vocab_size)
        for first in range(0, len(keys), rows):
            bits = _mix_(keys[first : first + rows, None] ^ self._token_keys).bitwise_and_((1 << 53) - 1)
            # the middle of one of 2**53 equal parts of (0, 1): never 0 or 1
            uniform = bits.to(torch.float64).add_(0.5).mul_(2.0**-53)
            times[first : first + rows] = uniform.log_().neg_().log_()
        return times


def rank_and_top(
    logprobs: Tensor, token_ids: Tensor, num_top: int
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int64] | None, NDArray[np.float32] | None]:
    """Return log-probability and rank (1 is the most likely) of given tokens, and the ``num_top`` most likely ones.

    Parameters
    ----------
    logprobs:
        ``[n, vocab_size]``.
    token_ids:
        ``[n]``.
    num_top:
        Candidates wanted; with 0 the last two results are None.
    """
    chosen = logprobs.gather(-1, token_ids[:, None])
    ranks = (logprobs >= chosen).sum(-1).numpy()
    if not num_top:
        return chosen[:, 0].numpy(), ranks, None, None
    values, indices = logprobs.topk(num_top, dim=-1)
    return chosen[:, 0].numpy(), ranks, indices.numpy(), values.numpy()


# SplitMix64: the golden-ratio step and the finaliser's constants, as signed 64-bit numbers (torch multiplies
# int64 modulo 2**64). Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)
#: draws whose intermediate results fit the cache of a CPU core
_DRAWN_AT_ONCE = 1 << 16


def _mix(x: Tensor) -> Tensor:
    """Apply SplitMix64's finaliser elementwise."""
    return _mix_(x.clone())


def _mix_(x: Tensor) -> Tensor:
    """Do the same in place."""
    shifted = torch.empty_like(x)
    for bits, factor in ((30, _FIRST), (27, _SECOND), (31, None)):
        torch.bitwise_right_shift(x, bits, out=shifted)
        # a logical shift: torch's own on int64 keeps the sign
        x.bitwise_xor_(shifted.bitwise_and_((1 << (64 - bits)) - 1))
        if factor is not None:
            x.mul_(factor)
    return x
