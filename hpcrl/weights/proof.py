"""What an engine answers when it is asked whether it runs the weights of a version."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["PROVE_WEIGHTS", "WeightsProof"]

PROVE_WEIGHTS = "prove_weights"
"""The method of ``/collective_rpc``; its arguments are the version's directory, that of the version before or an empty
string, and the number of the proof."""


class WeightsProof(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of one process that holds weights.

    Attributes
    ----------
    state:
        ``reading``: ask again. ``compared``: see below. ``unknown``: nothing could be compared, and ``why``.
    compared:
        Tensors of the version that were compared with what runs.
    wrong:
        Those of them that differ.
    decisive:
        Whether the version before differs there, as far as that is known: equal tensors say little otherwise.
    """

    state: Literal["reading", "compared", "unknown"]
    compared: list[str] = []
    wrong: list[str] = []
    decisive: bool = False
    why: str = ""
