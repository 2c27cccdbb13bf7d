"""Proof by an engine that it runs the weights of a version."""

from __future__ import annotations

from typing import Literal

import msgspec

PROVE_WEIGHTS = "prove_weights"
"""Method of ``/collective_rpc``; its arguments are the version's directory, that of the previous version or an empty
string, and the number of the proof."""


class WeightsProof(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of one process that holds weights.

    Attributes
    ----------
    state:
        ``reading``: ask again. ``compared``: see below. ``unknown``: nothing could be compared, for the reason ``why``.
    compared:
        Tensors of the version that were compared with the running weights.
    wrong:
        Compared tensors that differ.
    decisive:
        Whether the previous version differs in these tensors, as far as that is known: otherwise equal tensors prove
        little.
    """

    state: Literal["reading", "compared", "unknown"]
    compared: list[str] = []
    wrong: list[str] = []
    decisive: bool = False
    why: str = ""
