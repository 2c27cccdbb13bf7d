"""Excerpt of a long text from its tokens: only the two ends are decoded, so that the cost depends on their length."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

_TOKENS_A_CHARACTER = 4
"""Maximum tokens of a character: UTF-8 has up to four bytes, and a tokenizer may have a token for each of them."""
_MARGIN = 2 * _TOKENS_A_CHARACTER
"""Number of characters at a cut that are ignored: fragments of a character, and a space that decoders omit at a start.
"""
_UNREADABLE = "\ufffd"


def excerpt(token_ids: NDArray[np.int32], decode: Callable[[Sequence[int]], str], characters: int) -> str:
    """Return the text of ``token_ids [T]``, its middle left out where it is longer than ``characters``.

    ``decode`` returns the text of a sequence of tokens. It is not called for the middle of a long text.
    """
    half = characters // 2
    head = _end(len(token_ids), half, lambda count: decode(token_ids[:count].tolist()), slice(None, half))
    tail = _end(len(token_ids), half, lambda count: decode(token_ids[-count:].tolist()), slice(-half, None))
    if head is None or tail is None:
        text = decode(token_ids.tolist())
        return text if len(text) <= characters else f"{text[:half]} … {text[-half:]}"
    return f"{head} … {tail}"


def _end(tokens: int, wanted: int, decode: Callable[[int], str], kept: slice) -> str | None:
    """Return ``kept`` of as few tokens as contain enough text; None where that takes half of them or more.

    A cut within a character may spoil more than that one: what a tokenizer has in bytes alone is decoded as a whole.
    So of a few cuts that one counts which spoils nothing, or least.
    """
    count = max(1, wanted // 2)
    while 2 * (count + _TOKENS_A_CHARACTER) <= tokens:
        text, more = decode(count), 1
        while _UNREADABLE in text and more < _TOKENS_A_CHARACTER:
            text = min(text, decode(count + more), key=lambda each: each.count(_UNREADABLE))
            more += 1
        if len(text) >= wanted + _MARGIN:
            return text[kept]
        count *= 2
    return None
