"""Tokens of one conversation as growing arrays, and as the text in which requests may carry them.

Each turn appends to the arrays, and to the text where it is used; earlier tokens are neither encoded nor converted
again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hpcrl.rollouts.core.prompts import EncodedTokens, encode_ids

_FIRST_CAPACITY = 1024


class TokenSequence:
    """``T`` tokens: ids, whether they were sampled, log-probabilities, versions. 13 bytes a token, and its text."""

    def __init__(self) -> None:
        self._length = 0
        self._token_ids = np.empty(_FIRST_CAPACITY, np.int32)
        self._sampled = np.empty(_FIRST_CAPACITY, np.uint8)
        self._logprobs = np.empty(_FIRST_CAPACITY, np.float32)
        self._versions = np.empty(_FIRST_CAPACITY, np.int32)
        self._text = bytearray()
        self._encoded = 0

    def __len__(self) -> int:
        return self._length

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """``[T]``: a view, which holds until tokens are appended."""
        return self._token_ids[: self._length]

    def append_said(self, token_ids: NDArray[np.int32]) -> None:
        """Append tokens that the policy did not sample: no log-probability, version 0."""
        self._append(token_ids, 0, 0.0, 0)

    def append_sampled(
        self,
        token_ids: NDArray[np.int32],
        logprobs: float | Sequence[float] | NDArray[np.float32],
        versions: int | Sequence[int] | NDArray[np.int32],
    ) -> None:
        """Append tokens that the policy sampled; a single number applies to all of them."""
        self._append(token_ids, 1, logprobs, versions)

    def _append(
        self,
        token_ids: NDArray[np.int32],
        sampled: int,
        logprobs: float | Sequence[float] | NDArray[np.float32],
        versions: int | Sequence[int] | NDArray[np.int32],
    ) -> None:
        if not len(token_ids):
            return
        start, end = self._length, self._length + len(token_ids)
        if end > len(self._token_ids):
            capacity = max(end, 2 * len(self._token_ids))
            for name in ("_token_ids", "_sampled", "_logprobs", "_versions"):
                before = getattr(self, name)
                grown = np.empty(capacity, before.dtype)
                grown[:start] = before[:start]
                setattr(self, name, grown)
        self._token_ids[start:end] = token_ids
        self._sampled[start:end] = sampled
        self._logprobs[start:end] = logprobs
        self._versions[start:end] = versions
        self._length = end

    def truncate(self, length: int) -> None:
        """Leave out all tokens behind the first ``length``."""
        self._length = min(self._length, length)
        if self._encoded > self._length:
            self._text, self._encoded = bytearray(), 0

    @property
    def encoded(self) -> EncodedTokens:
        """Return all token ids in the form of a request."""
        count = self._length
        return EncodedTokens(self._token_ids[:count], lambda: self._text_of(count))

    def _text_of(self, count: int) -> bytes | bytearray:
        """Return the first ``count`` ids as `encode_ids` gives them."""
        if count < self._encoded:
            return encode_ids(self._token_ids[:count].tolist())
        if count > self._encoded:
            self._text += b"," if self._encoded else b""
            self._text += encode_ids(self._token_ids[self._encoded : count].tolist())
            self._encoded = count
        return self._text

    def end_of_sampled(self) -> int:
        """Return the number of tokens up to the last sampled one; 0 where there is none."""
        places = np.flatnonzero(self._sampled[: self._length])
        return int(places[-1]) + 1 if len(places) else 0

    def arrays(self, end: int) -> tuple[NDArray[np.int32], NDArray[np.uint8], NDArray[np.float32], NDArray[np.int32]]:
        """Return copies of the ids, sampled flags, log-probabilities and versions of the first ``end`` tokens."""
        return (
            self._token_ids[:end].copy(),
            self._sampled[:end].copy(),
            self._logprobs[:end].copy(),
            self._versions[:end].copy(),
        )
