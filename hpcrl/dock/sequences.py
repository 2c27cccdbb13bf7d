"""Places of the sequences of a rollout among its tokens, and of its turns in them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_TURN_FIELDS = 7
"""Number of fields of `hpcrl.rollouts.core.records.Turn`."""


def sequence_lengths(starts: NDArray[Any] | None, tokens: int) -> list[int]:
    """Return the tokens of each sequence of a rollout.

    Parameters
    ----------
    starts:
        ``[n]`` whole numbers: the first token of each; None where there is one sequence.
    tokens:
        Tokens of the rollout.

    Raises
    ------
    ValueError
        ``starts`` do not divide ``tokens`` tokens into sequences.
    """
    if starts is None:
        return [tokens]
    if starts.ndim != 1 or starts.dtype.kind not in "iu" or not len(starts):
        raise ValueError(f"starts of sequences are whole numbers [n], not {starts.shape} of {starts.dtype}")
    bounds = [*starts.tolist(), tokens]
    lengths: list[int] = np.diff(bounds).tolist()
    if bounds[0] != 0 or min(lengths) < 1:
        raise ValueError(f"starts {bounds[:-1]} do not cut {tokens} tokens into sequences")
    return lengths


def own_tokens(columns: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    """Return the token ids of a rollout without the prefixes that its sequences share with earlier ones, for people.

    Parameters
    ----------
    columns:
        Of the rollout: ``token_ids [T]``, and with several sequences ``starts`` and ``shared [n]``.

    Raises
    ------
    KeyError, ValueError
        They are not those of a rollout.
    """
    ids, starts, shared = columns["token_ids"], columns.get("starts"), columns.get("shared")
    if starts is None or shared is None:
        return ids
    lengths = sequence_lengths(starts, len(ids))
    parts = zip(starts.tolist(), lengths, shared.tolist(), strict=True)
    return np.concatenate([ids[begin + prefix : begin + length] for begin, length, prefix in parts])


def turn_fields(turn: Sequence[Any]) -> list[Any]:
    """Return all fields of a turn. Earlier versions wrote only the first four or six: the others are 0."""
    return [*turn, *(0 for _ in range(_TURN_FIELDS - len(turn)))]


class TurnPlace(NamedTuple):
    """Tokens of a turn among those of its rollout.

    Attributes
    ----------
    begin:
        First token of its sequence.
    said, sampled, end:
        First token that was appended before it, first one that was sampled, and the one behind it.
    """

    begin: int
    said: int
    sampled: int
    end: int


def turn_places(turns: Iterable[Sequence[Any]], starts: NDArray[Any] | None) -> list[TurnPlace]:
    """Return where turns lie.

    Parameters
    ----------
    turns:
        Fields of `hpcrl.rollouts.core.records.Turn`, of which those of sequences may be missing.
    starts:
        See `sequence_lengths`.

    Raises
    ------
    ValueError
        A turn is of a sequence that the rollout does not have.
    """
    begins = [0] if starts is None else starts.tolist()
    ends = list(begins)
    found = []
    for turn in turns:
        said, sampled, _, _, number, shared, *_ = map(int, turn_fields(turn))
        if not 0 <= number < len(begins):
            raise ValueError(f"a turn is of sequence {number}, and there are {len(begins)}")
        at = ends[number] + shared
        ends[number] = at + said + sampled
        found.append(TurnPlace(begins[number], at, at + said, at + said + sampled))
    return found
