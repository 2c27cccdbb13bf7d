"""Whether an engine that has loaded an adapter computes with it: its log-probabilities of a fixed prompt say so.

The trainer computes them twice, with the adapter merged and rounded as engines do it, and without; both stand beside
the version (``canary.json``). What the engine then says lies, with a dimension for each token, near one or the
other: an engine that has dropped the adapter is where the model without it is, and answers requests as if nothing was
wrong. Where the two are too near each other for the engine's own rounding, nothing can be said, and a later version is
asked. No torch, no numpy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

__all__ = ["Canary", "CanaryVerdict", "judge"]

_NOISE = 0.5
"""Most deviation of an engine, relative to what the adapter changes, at which its answer counts. Over 63 tokens a
deviation in any direction moves the share that is found by a sixteenth of that."""
_SHARE = 0.5
"""Halfway between an engine without the adapter and one with it."""


class Canary(msgspec.Struct, frozen=True):
    """What a trainer says of a prompt.

    Attributes
    ----------
    token_ids:
        The prompt.
    plain, adapted:
        Log-probability of each token but the first, without the adapter and with it.
    """

    token_ids: list[int]
    plain: list[float]
    adapted: list[float]


class CanaryVerdict(NamedTuple):
    """What an engine's log-probabilities say.

    Attributes
    ----------
    outcome:
        ``applied``; ``ignored``: it computes without the adapter, or with something else; ``unclear``: the adapter
        changes too little for the engine's deviation.
    share:
        How much of the trainer's difference is found: 1 with the adapter, 0 without it.
    deviation:
        The rest of what the engine says otherwise, relative to the trainer's difference.
    """

    outcome: Literal["applied", "ignored", "unclear"]
    share: float
    deviation: float


def judge(canary: Canary, adapted: Sequence[float], plain: Sequence[float] | None = None) -> CanaryVerdict:
    """Compare what an engine says with the adapter, and before it had it, with what the trainer says.

    With ``d`` the trainer's difference and ``e`` the engine's, the share is ``<e, d> / <d, d>``, and the deviation
    ``|e - share d| / |d|``.

    Parameters
    ----------
    adapted:
        Log-probabilities of the engine that has loaded the version.
    plain:
        Of the same engine with the model alone; None where they were not asked for: the trainer's are taken.

    Raises
    ------
    ValueError
        There are not as many as tokens.
    """
    if any(len(own) != len(canary.plain) for own in (adapted, canary.adapted, plain or canary.plain)):
        raise ValueError(f"{len(adapted)} log-probabilities of a prompt of {len(canary.token_ids)} tokens")
    d = [a - p for a, p in zip(canary.adapted, canary.plain, strict=True)]
    e = [a - p for a, p in zip(adapted, plain or canary.plain, strict=True)]
    size = math.hypot(*d)
    if size == 0.0:
        return CanaryVerdict("unclear", 0.0, math.inf)
    share = sum(own * of for own, of in zip(e, d, strict=True)) / size**2
    rest = math.hypot(*(own - share * of for own, of in zip(e, d, strict=True))) / size
    if plain is None:
        # the deviation of the engine is in it, whatever it computes with
        if rest > _NOISE:
            return CanaryVerdict("unclear", share, rest)
        return CanaryVerdict("applied" if share > _SHARE else "ignored", share, rest)
    noise = math.hypot(*(own - of for own, of in zip(plain, canary.plain, strict=True))) / size
    if noise > _NOISE:
        return CanaryVerdict("unclear", share, rest)
    # a deviation that it did not have before: it computes with something else than the adapter
    return CanaryVerdict("applied" if share > _SHARE and rest <= _NOISE + noise else "ignored", share, rest)
