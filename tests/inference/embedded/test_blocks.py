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


def test_found_blocks_count_only_if_they_are_free() -> None:
    """`share` takes so many out of the free ones."""
    pool = BlockPool(4)
    assert pool.num_free_among(range(4)) == pool.num_free == 4
    blocks = pool.allocate(3)
    assert (pool.num_free_among(blocks), pool.num_free_among(range(4)), pool.num_free) == (0, 1, 1)
    pool.register(blocks[0], b"x")
    pool.register(blocks[1], b"y")
    pool.release(blocks[:1])
    found = pool.match([b"x", b"y"])
    assert pool.num_free_among(found) == 1
    before = pool.num_free
    pool.share(found)
    assert pool.num_free == before - 1
    assert pool.num_free_among(found) == 0


def test_usage_is_the_share_of_held_blocks() -> None:
    pool = BlockPool(4)
    assert pool.usage == 0.0
    blocks = pool.allocate(3)
    pool.register(blocks[0], b"x")
    assert pool.usage == 0.75
    pool.release(blocks)
    assert (pool.usage, pool.num_cached) == (0.0, 1)


def test_more_blocks_than_are_free_cannot_be_taken() -> None:
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="3 blocks wanted, 2 free"):
        pool.allocate(3)
    assert sorted(pool.allocate(2)) == [0, 1]
    assert pool.allocate(0) == []


def test_the_first_block_with_a_hash_stays_the_one_that_is_found() -> None:
    pool = BlockPool(3)
    first, second, third = pool.allocate(3)
    pool.register(first, b"x")
    pool.register(second, b"x")
    pool.register(first, b"y")  # it holds what it was registered with
    assert (pool.match([b"x"]), pool.match([b"y"]), pool.num_cached) == ([first], [], 1)
    pool.release([first])
    pool.release([third])
    pool.release([second])
    # the second is not known by any hash: those that hold nothing go first
    assert pool.allocate(2) == [second, third]
    assert pool.match([b"x"]) == [first]


def test_what_is_not_to_be_trusted_is_found_no_more_and_is_still_held() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    pool.register(blocks[0], b"x")
    pool.forget(blocks)
    assert (pool.match([b"x"]), pool.num_cached, pool.num_free) == ([], 0, 0)
    pool.release(blocks)
    assert pool.num_free == 2
    pool.register(pool.allocate(1)[0], b"x")
    assert pool.num_cached == 1


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


def test_blocks_that_were_reset_are_used_again() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    for block, value in zip(blocks, (b"x", b"y"), strict=True):
        pool.register(block, value)
    pool.release(blocks)
    assert pool.reset()
    again = pool.allocate(2)
    assert sorted(again) == sorted(blocks)
    pool.register(again[0], b"z")
    assert (pool.match([b"z"]), pool.match([b"x"]), pool.num_cached) == (again[:1], [], 1)


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
