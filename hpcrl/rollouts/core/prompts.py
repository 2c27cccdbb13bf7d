"""Prompts as requests carry them: in binary, or as text that was encoded once, however many requests it is part of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

_encoder = msgspec.json.Encoder()


def encode_ids(token_ids: Sequence[int]) -> bytes:
    """Return token ids as JSON has them between brackets."""
    return _encoder.encode(token_ids)[1:-1]


class EncodedTokens:
    """Token ids in the forms of requests; each form is made when it is first needed.

    Attributes
    ----------
    token_ids:
        int32.
    """

    def __init__(self, token_ids: NDArray[np.int32], text: Callable[[], bytes | bytearray]) -> None:
        """Take ids, which are not changed, and a function that returns them as `encode_ids` does."""
        self.token_ids, self._text = token_ids, text

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def raw(self) -> msgspec.Raw:
        """Return the list as JSON, to be put into a request unchanged."""
        return msgspec.Raw(b"".join((b"[", self._text(), b"]")))

    def followed_by(self, token_ids: list[int]) -> EncodedTokens:
        """Return the same tokens with ``token_ids`` appended."""

        def text() -> bytes:
            return b",".join(part for part in (self._text(), encode_ids(token_ids)) if part)

        return EncodedTokens(np.concatenate([self.token_ids, np.array(token_ids, np.int32)]), text)


PromptTokens = list[int] | EncodedTokens


def binary_ids(prompt: PromptTokens) -> bytes:
    """Return token ids in the encoding of `hpcrl.network.generate_frames`."""
    return np.asarray(prompt.token_ids if isinstance(prompt, EncodedTokens) else prompt, "<i4").tobytes()
