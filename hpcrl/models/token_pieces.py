"""Sequences of tokens for people: control tokens apart from the text between them, which may spell them too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hpcrl.models.tokenizer import ChatTokenizer

CONTROL = "control"
"""The kind of control tokens."""


class TokenPiece(NamedTuple):
    """Consecutive tokens of one kind.

    Attributes
    ----------
    kind:
        ``control``, or what the text is.
    text:
        Text of the tokens.
    """

    kind: str
    text: str


def pieces_of(tokenizer: ChatTokenizer, token_ids: Sequence[int], kinds: Sequence[str] | str) -> list[TokenPiece]:
    """Return a sequence in pieces; ``kinds`` are the kinds of tokens that are not control tokens, each or all."""
    each = [kinds] * len(token_ids) if isinstance(kinds, str) else kinds
    control = tokenizer.control_ids
    pieces: list[TokenPiece] = []
    begin = 0
    known = [CONTROL if token in control else kind for token, kind in zip(token_ids, each, strict=True)]
    for end in range(1, len(known) + 1):
        if end == len(known) or known[end] != known[begin]:
            text = tokenizer.decode(token_ids[begin:end], skip_special_tokens=False)
            pieces.append(TokenPiece(known[begin], text))
            begin = end
    return pieces
