"""KV blocks in transfer between engines: a block is sent with a hash that proves its identity and integrity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import xxhash

KEY_BYTES = 16
"""Bytes of a block's name: the hash of its tokens, of all tokens before them, and of the salt of its sequence."""
_SEAL_BYTES = 16


class BlockFormat(NamedTuple):
    """Format of an engine's blocks.

    Attributes
    ----------
    layout:
        Names of layers, shapes and dtypes. Engines with another layout have other seals.
    block_bytes:
        Bytes of the keys, values and experts of the tokens of one block.
    """

    layout: str
    block_bytes: int

    @property
    def sealed_bytes(self) -> int:
        """Return the bytes of a sealed block."""
        return self.block_bytes + _SEAL_BYTES

    def seal(self, key: bytes, block: bytes) -> bytes:
        """Return the block as it is sent, under the name ``key``."""
        return block + self._hash(key, block)

    def open(self, keys: Sequence[bytes], data: bytes | memoryview) -> list[bytes]:
        """Return the first of ``keys``' blocks from sealed blocks that were received one after the other.

        Raises
        ------
        ValueError
            They are cut, damaged, of other tokens, or of an engine with another layout. None of them is to be used.
        """
        count, rest = divmod(len(data), self.sealed_bytes)
        if rest or count > len(keys):
            raise ValueError(f"{len(data)} bytes are not at most {len(keys)} whole blocks of {self.sealed_bytes} bytes")
        blocks = []
        for i, key in enumerate(keys[:count]):
            start = i * self.sealed_bytes
            end = start + self.block_bytes
            block = bytes(data[start:end])
            if data[end : end + _SEAL_BYTES] != self._hash(key, block):
                raise ValueError(f"block {i} of {count} is damaged, or not the one that was asked for")
            blocks.append(block)
        return blocks

    def _hash(self, key: bytes, block: bytes) -> bytes:
        digest = xxhash.xxh3_128(self.layout.encode())
        digest.update(key)
        digest.update(block)
        return digest.digest()
