"""Sequences of tokens for people: control tokens apart from the text between them, which may spell them too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hpcrl.models.tokenizer import ChatTokenizer

__all__ = ["CONTROL", "TokenPiece", "pieces_of"]

CONTROL = "control"
"""The kind of control tokens."""


class TokenPiece(NamedTuple):
    """Some tokens of one kind, one behind the other.

    Attributes
    ----------
    kind:
        ``control``, or what the text is.
    text:
        Of the tokens.
    """

    kind: str
    text: str


def pieces_of(tokenizer: ChatTokenizer, token_ids: Sequence[int], kinds: Sequence[str] | str) -> list[TokenPiece]:
    """Return a sequence in pieces; ``kinds`` says what each token is where it is no control token, or what all are."""
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
