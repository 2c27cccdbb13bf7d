"""Blocks that are found by hash, with what is in them: read for other engines, and filled with what these computed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from hpcrl.inference.embedded.engine.attention import KVCache
from hpcrl.inference.embedded.engine.blocks import BlockPool
from hpcrl.inference.embedded.kv.sealing import BlockFormat


class CachedBlocks:
    """The prefix cache as bytes. Used on the model thread only; `format` may be read by all.

    Attributes
    ----------
    format:
        Format of each block.
    """

    def __init__(self, pool: BlockPool, cache: KVCache) -> None:
        self._pool, self._cache = pool, cache
        tensors = [(*item, kind) for kind in ("keys", "values") for item in getattr(cache, kind).items()]
        layers = [f"{kind}{layer}:{tensor.shape[1]}" for layer, tensor, kind in tensors]
        experts = cache.experts[: cache.block_size]
        layout = f"{cache.dtype} {cache.block_size} {' '.join(layers)} {experts.dtype}{experts.shape}"
        size = sum(tensor.shape[1] * tensor.element_size() for _, tensor, _ in tensors) + experts.nbytes
        self.format = BlockFormat(layout, size)

    def count(self, keys: Sequence[bytes]) -> int:
        """Return how many of the first blocks are cached."""
        return len(self._pool.match(keys))

    def read(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return the contents of the first blocks that are cached."""
        return [self.content(block) for block in self._pool.match(keys)]

    def content(self, block: int) -> bytes:
        """Return the content of a block."""
        return b"".join(part.tobytes() for part in self._parts(block))

    def load(self, keys: Sequence[bytes], contents: Sequence[bytes]) -> list[int]:
        """Take a free block for each, fill it, and register its hash. The caller has checked that enough are free.

        Raises
        ------
        ValueError
            A content has another size than a block; nothing was taken.
        """
        if any(len(content) != self.format.block_bytes for content in contents):
            raise ValueError(f"KV of another engine does not have the {self.format.block_bytes} bytes of a block")
        blocks = self._pool.allocate(len(contents))
        for block, key, content in zip(blocks, keys, contents, strict=True):
            data, start = np.frombuffer(content, np.uint8), 0
            for part in self._parts(block):
                part[:] = data[start : start + part.size]
                start += part.size
            self._pool.register(block, key)
        return blocks

    def _parts(self, block: int) -> list[NDArray[np.uint8]]:
        """Return the memory of a block as bytes: keys of each layer, values of each layer, experts."""
        cache = self._cache
        tensors = [tensor[block] for of_layers in (cache.keys, cache.values) for tensor in of_layers.values()]
        experts = cache.experts[block * cache.block_size : (block + 1) * cache.block_size]
        return [*(tensor.view(torch.uint8).numpy() for tensor in tensors), experts.reshape(-1).view(np.uint8)]
