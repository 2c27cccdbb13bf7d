"""The block pool: nothing is lost, nothing is shared by mistake, the least useful goes first."""

from __future__ import annotations

import random

import numpy as np
import pytest

from hpcrl.inference.embedded.engine.blocks import BlockPool, block_hash, root_hash


def chain(tokens: list[int], size: int, salt: str | None = None) -> list[bytes]:
    parent, hashes = root_hash(salt), []
    for i in range(len(tokens) // size):
        parent = block_hash(parent, np.asarray(tokens[i * size : (i + 1) * size], np.int32).tobytes())
        hashes.append(parent)
    return hashes


def test_hash_covers_tokens_parents_and_salt() -> None:
    base = chain([1, 2, 3, 4, 5, 6], 2)
    assert chain([1, 2, 3, 4, 5, 7], 2)[:2] == base[:2]
    assert chain([1, 2, 3, 4, 5, 7], 2)[2] != base[2]
    assert chain([9, 2, 3, 4, 5, 6], 2)[2] != base[2]  # the same block behind another prefix
    salted = [chain([1, 2, 3, 4, 5, 6], 2, salt) for salt in (None, "1", "2", "12")]
    assert len({hashes[i] for hashes in salted for i in range(3)}) == 12


def test_match_stops_at_the_first_gap() -> None:
    pool = BlockPool(4)
    hashes = chain([1, 2, 3, 4, 5, 6], 2)
    blocks = pool.allocate(3)
    for block, value in zip(blocks, hashes, strict=True):
        pool.register(block, value)
    assert pool.match(hashes) == blocks
    assert pool.match([hashes[0], b"other", hashes[2]]) == blocks[:1]


def test_released_blocks_stay_findable_until_they_are_needed() -> None:
    pool = BlockPool(3)
    hashes = chain(list(range(6)), 2)
    blocks = pool.allocate(3)
    for block, value in zip(blocks, hashes, strict=True):
        pool.register(block, value)
    pool.release(blocks)
    assert pool.num_free == 3
    assert pool.match(hashes) == blocks
    pool.allocate(1)  # takes the tail of the sequence, so that the prefix stays useful
    assert pool.match(hashes) == blocks[:2]
    pool.allocate(1)
    assert pool.match(hashes) == blocks[:1]


def test_blocks_that_hold_nothing_go_before_cached_ones() -> None:
    pool = BlockPool(2)
    (cached,) = pool.allocate(1)
    pool.register(cached, b"x")
    (plain,) = pool.allocate(1)
    pool.release([cached])
    pool.release([plain])
    assert pool.allocate(1) == [plain]


def test_shared_blocks_are_free_when_the_last_user_is_gone() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    pool.register(blocks[0], b"x")
    pool.share(blocks[:1])
    pool.release(blocks)
    assert pool.num_free == 1
    pool.release(blocks[:1])
    assert pool.num_free == 2
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks[:1])


def test_reset_needs_an_idle_pool() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.register(blocks[0], b"x")
    assert not pool.reset()
    assert pool.match([b"x"]) == blocks
    pool.release(blocks)
    assert pool.reset()
    assert pool.match([b"x"]) == []
    assert pool.num_cached == 0


def test_without_caching_nothing_is_found() -> None:
    pool = BlockPool(1, caching=False)
    pool.register(pool.allocate(1)[0], b"x")
    assert pool.match([b"x"]) == []


@pytest.mark.parametrize("seed", range(5))
def test_random_use_keeps_the_books(seed: int) -> None:
    """References, free blocks and found blocks always agree with a model that is kept beside the pool."""
    rng, pool = random.Random(seed), BlockPool(16)
    held: list[list[int]] = []
    content: dict[int, bytes] = {}
    for turn in range(2000):
        action = rng.random()
        if action < 0.4 and pool.num_free:
            blocks = pool.allocate(rng.randint(1, pool.num_free))
            for block in blocks:
                content.pop(block, None)
            if rng.random() < 0.7:
                pool.register(blocks[0], b"%d" % turn)
                content[blocks[0]] = b"%d" % turn
            held.append(blocks)
        elif action < 0.6 and content:
            block, value = rng.choice(list(content.items()))
            assert pool.match([value]) == [block]
            pool.share([block])
            held.append([block])
        elif held:
            pool.release(held.pop(rng.randrange(len(held))))
        in_use = {block for blocks in held for block in blocks}
        assert pool.num_free == 16 - len(in_use)
        assert pool.num_cached == len(content)
