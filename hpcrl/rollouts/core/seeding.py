"""Random choices that are equal in every process and every run: a stable hash instead of a generator's state."""

from __future__ import annotations

import xxhash


def stable_hash(*parts: int | str) -> int:
    """Return a number in ``[0, 2**63)`` that depends on ``parts`` alone.

    Python's own ``hash`` differs between processes, and a generator's state depends on earlier draws; neither can be
    reproduced by a run that resumes in the middle.
    """
    text = "\0".join(f"{type(part).__name__}:{part}" for part in parts)
    return xxhash.xxh3_64_intdigest(text.encode()) >> 1


def stable_fraction(*parts: int | str) -> float:
    """Return a number in ``[0, 1)`` that depends on ``parts`` alone."""
    return stable_hash(*parts) / 2.0**63
