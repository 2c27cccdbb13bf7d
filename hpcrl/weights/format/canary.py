"""Check that an engine computes with the adapter that it has loaded, by its log-probabilities of a fixed prompt.

The trainer computes them twice, with the adapter merged and rounded as engines do it, and without; both are stored in
the version (``canary.json``). The vector of the engine's log-probabilities, one per token, is then near one or the
other: an engine that has dropped the adapter is near the model without it, and answers requests without an error. Where
the two are closer to each other than the engine's own rounding, the result is unclear, and a later version is checked.
No torch, no numpy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

_NOISE = 0.5
"""Maximum deviation of an engine, relative to the change by the adapter, at which its answer counts. Over 63 tokens a
deviation in a random direction moves the found share by a sixteenth of it."""
_SHARE = 0.5
"""Threshold halfway between an engine without the adapter and one with it."""


class Canary(msgspec.Struct, frozen=True):
    """Reference values of a prompt, as the trainer computed them.

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
    """Verdict on an engine by its log-probabilities.

    Attributes
    ----------
    outcome:
        ``applied``; ``ignored``: it computes without the adapter, or with something else; ``unclear``: the adapter
        changes too little for the engine's deviation.
    share:
        Fraction of the trainer's difference that is found: 1 with the adapter, 0 without it.
    deviation:
        Remaining deviation of the engine, relative to the trainer's difference.
    """

    outcome: Literal["applied", "ignored", "unclear"]
    share: float
    deviation: float


def judge_canary(canary: Canary, adapted: Sequence[float], plain: Sequence[float] | None = None) -> CanaryVerdict:
    """Compare an engine's values with the adapter, and before it was loaded, with those of the trainer.

    With ``d`` the trainer's difference and ``e`` the engine's, the share is ``<e, d> / <d, d>``, and the deviation
    ``|e - share d| / |d|``.

    Parameters
    ----------
    adapted:
        Log-probabilities of the engine that has loaded the version.
    plain:
        Values of the same engine with the model alone; None where they were not requested: the trainer's are used.

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
        # this includes the engine's own deviation, with or without the adapter
        if rest > _NOISE:
            return CanaryVerdict("unclear", share, rest)
        return CanaryVerdict("applied" if share > _SHARE else "ignored", share, rest)
    noise = math.hypot(*(own - of for own, of in zip(plain, canary.plain, strict=True))) / size
    if noise > _NOISE:
        return CanaryVerdict("unclear", share, rest)
    # a deviation that it did not have before the load: it computes with other weights than the adapter's
    return CanaryVerdict("applied" if share > _SHARE and rest <= _NOISE + noise else "ignored", share, rest)
