"""The pool of KV-cache blocks: reference counts, prefix cache, eviction. Numbers only, no tensors.

A full block is known by a hash that covers its tokens and, through its parent's hash, every token before it;
the first block's hash also covers the request's ``cache_salt``. So a block found by hash holds the KV of
exactly that prefix under exactly that salt.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence


def root_hash(cache_salt: str | None) -> bytes:
    """Return the hash that precedes the first block of a sequence."""
    return hashlib.blake2b(b"" if cache_salt is None else b"salt:" + cache_salt.encode(), digest_size=16).digest()


def block_hash(parent: bytes, tokens: bytes) -> bytes:
    """Hash of a block from its parent's hash and the bytes of its int32 tokens."""
    return hashlib.blake2b(parent + tokens, digest_size=16).digest()


class BlockPool:
    """All blocks of the KV cache.

    A block is in use (referenced by one or more requests) or free. A free block may still be cached: it can
    be found by its hash until it is allocated for something else. Free blocks are taken least recently used
    first, those that hold nothing worth finding before all others.
    """

    def __init__(self, num_blocks: int, *, caching: bool = True) -> None:
        self.num_blocks, self.caching = num_blocks, caching
        self._references = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Return the number of blocks that no request refers to, cached ones included."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Return the number of blocks that can be found by hash."""
        return len(self._by_hash)

    @property
    def usage(self) -> float:
        """Return the share of blocks in use, 0 to 1."""
        return 1.0 - len(self._free) / self.num_blocks

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the blocks of the longest cached prefix. They are not reserved: call `share` before anything else."""
        found: list[int] = []
        for value in hashes:
            block = self._by_hash.get(value)
            if block is None:
                break
            found.append(block)
        return found

    def num_free_among(self, blocks: Iterable[int]) -> int:
        """Return how many of ``blocks`` are free now, and would no longer be after `share`."""
        return sum(self._references[block] == 0 for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """Take one more reference on each block."""
        for block in blocks:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` free blocks; what they had cached is forgotten. The caller has checked `num_free`."""
        assert count <= len(self._free), f"{count} blocks wanted, {len(self._free)} free"
        blocks: list[int] = []
        for _ in range(count):
            block, _nothing = self._free.popitem(last=False)
            self._forget(block)
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one reference on each block of a sequence, given in sequence order.

        The tail is offered for eviction before the head: a shorter prefix helps more requests.
        """
        for block in reversed(blocks):
            self._references[block] -= 1
            assert self._references[block] >= 0, f"block {block} released twice"
            if self._references[block] == 0:
                self._free[block] = None
                if self._hash_of[block] is None:
                    self._free.move_to_end(block, last=False)

    def register(self, block: int, value: bytes) -> None:
        """Make a full block in use findable. The first block with a hash stays the one that is found."""
        if self.caching and self._hash_of[block] is None and value not in self._by_hash:
            self._by_hash[value] = block
            self._hash_of[block] = value

    def reset(self) -> bool:
        """Forget every cached block; return False, with nothing done, while any block is in use."""
        if len(self._free) != self.num_blocks:
            return False
        self._by_hash.clear()
        self._hash_of = [None] * self.num_blocks
        return True

    def forget(self, blocks: Iterable[int]) -> None:
        """Make blocks that are in use findable no more: what is in them is not to be trusted."""
        for block in blocks:
            self._forget(block)

    def _forget(self, block: int) -> None:
        value = self._hash_of[block]
        if value is not None:
            del self._by_hash[value]
            self._hash_of[block] = None
