"""The digest of a step's rollouts: equal for equal sets of names, however they are divided among ranks."""

from __future__ import annotations

import xxhash

from hpcrl.dock.ledger.digest import digest_of, digest_of_parts, digest_parts

NAMES = [(0, 0), (0, 1), (7, 3), (123456, 0)]


def test_one_rollout_has_the_hash_of_its_name() -> None:
    """Its four words, the lowest first."""
    whole = f"{xxhash.xxh3_128_intdigest(b'7/3'):032x}"
    words = [whole[at : at + 8] for at in (24, 16, 8, 0)]
    assert digest_of([(7, 3)]) == "".join(words)
    assert digest_parts([(7, 3)]) == [int(word, 16) for word in words]


def test_parts_of_ranks_add_up_to_the_digest_of_all() -> None:
    ranks = [digest_parts(NAMES[:1]), digest_parts(NAMES[1:]), digest_parts([])]
    assert ranks[2] == [0, 0, 0, 0]
    assert digest_of_parts([sum(parts) for parts in zip(*ranks, strict=True)]) == digest_of(reversed(NAMES))
    assert len(digest_of(NAMES)) == len(digest_of([])) == 32


def test_other_rollouts_have_another_digest() -> None:
    others = [NAMES[1:], [*NAMES, NAMES[0]], [(0, 0), (1, 0), (7, 3), (123456, 0)], []]
    assert len({digest_of(names) for names in (NAMES, *others)}) == 5
