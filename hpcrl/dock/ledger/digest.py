"""Digest of the rollouts of a step, in few bytes: a trainer can record it without names, and readers can compare it.

The 128 bits of a digest are sums of hashes of the rollouts' names, in parts of 32 bits. So ranks that share a batch add
up what each of them has, in whichever order, among the numbers that they add up anyway: parts of two million rollouts
are exact in float64. A rollout that occurs twice changes the digest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import xxhash

_PARTS = 4
_BITS = 32
_MASK = (1 << _BITS) - 1


def digest_parts(rollouts: Iterable[tuple[int, int]]) -> list[int]:
    """Return the parts of the digest of rollouts, given by group and member; those of several ranks may be added up."""
    sums = [0] * _PARTS
    for group, member in rollouts:
        own = xxhash.xxh3_128_intdigest(f"{group}/{member}".encode())
        sums = [total + (own >> _BITS * part & _MASK) for part, total in enumerate(sums)]
    return sums


def digest_of_parts(parts: Sequence[int]) -> str:
    """Return the digest of all rollouts whose parts were added up: 32 hexadecimal digits."""
    return "".join(f"{part & _MASK:08x}" for part in parts)


def digest_of(rollouts: Iterable[tuple[int, int]]) -> str:
    """Return the digest of rollouts, given by group and member."""
    return digest_of_parts(digest_parts(rollouts))
