"""Prompts as requests carry them: token ids that were encoded once, however many requests they are part of."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

__all__ = ["EncodedTokens", "PromptTokens", "encode_ids"]

_encoder = msgspec.json.Encoder()


def encode_ids(token_ids: Sequence[int]) -> bytes:
    """Token ids as JSON has them between brackets."""
    return _encoder.encode(token_ids)[1:-1]


class EncodedTokens:
    """Token ids as JSON.

    Attributes
    ----------
    raw:
        The list, to be put into a request as it is.
    """

    def __init__(self, count: int, ids: bytes | bytearray) -> None:
        """Take ``count`` ids as `encode_ids` gives them; several of these are joined by commas."""
        self._count, self._ids = count, bytes(ids)
        self.raw = msgspec.Raw(b"[" + self._ids + b"]")

    def __len__(self) -> int:
        return self._count

    def followed_by(self, token_ids: list[int]) -> EncodedTokens:
        """The same with more behind it."""
        more = encode_ids(token_ids)
        return EncodedTokens(self._count + len(token_ids), b",".join(part for part in (self._ids, more) if part))


PromptTokens = list[int] | EncodedTokens
