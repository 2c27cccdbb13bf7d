"""Store of the routed experts of prompts, for rollouts whose engine did not compute them: by cache salt and prefix.

If KV comes from a pool, the host or a prefill engine, the engine that answers has no rows of it; the one that
computed it returned them with another rollout of the same prompt. The orchestrator sees all answers, so rows are kept
here and not with the engines, and one store serves all paths of KV. It stores openings only (the first prompt of a
rollout): later tokens are sampled, so that no other rollout has the same prefix, and their rows came with the rollout's
own turns.

A block is kept from the first answer that has it, as the pool keeps the first KV of a key. Two engines may each have
computed a block under one salt, however, and the KV that was used may come from the other pass: such rows belong to the
same weights and prefix, but not certainly to the same pass. They are counted separately
(`Counters.rows_shared_prefix`).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from hpcrl.config.recipe import Recipe
from hpcrl.rollouts.core.counters import Counters

Tokens = Sequence[int] | NDArray[np.int32]
Name = tuple[int, bytes]
"""Key of a block: the salt, and a hash of its tokens and of all before them."""
Block = tuple[Name, NDArray[np.unsignedinteger] | None]


class KnownRows:
    """Store of routed experts of prompts; the least recently used blocks are evicted first.

    An opening may have 100,000 tokens, and 60 MB of rows. Functions that process all of them only read the store, and
    may run in a thread; functions that change it take milliseconds, and run in the event loop.

    Attributes
    ----------
    bytes:
        Size of the stored rows.
    """

    def __init__(self, counters: Counters, *, block: int, limit_bytes: int, keep_versions: int) -> None:
        """Begin, empty.

        Parameters
        ----------
        counters:
            Counters of the sources of rows.
        block:
            Tokens of a block; those of the engines' KV, because they know all rows of one or none.
        limit_bytes:
            Maximum size of the rows in bytes.
        keep_versions:
            Salts below the newest that are kept. No rollout that began earlier is used.
        """
        self._block, self._limit, self._keep = block, limit_bytes, keep_versions
        self._blocks: OrderedDict[Name, NDArray[np.unsignedinteger]] = OrderedDict()
        self._newest = -1
        self.counters, self.bytes = counters, 0

    @classmethod
    def of(cls, recipe: Recipe, counters: Counters) -> KnownRows:
        """Return the store of a run."""
        limit = round(recipe.engine.routed_experts_gib * (1 << 30))
        keep = recipe.rollouts.max_off_policy_steps
        return cls(counters, block=recipe.engine.block_size, limit_bytes=limit, keep_versions=keep)

    def blocks_of(
        self, salt: int, token_ids: Tokens, rows: NDArray[np.unsignedinteger], known: NDArray[np.bool_]
    ) -> list[Block]:
        """Return the whole blocks of an opening, for `keep`; nothing is changed, so that a thread may call it.

        Blocks that the store has already, or that have unknown rows, consist of the name only.

        Parameters
        ----------
        salt:
            Version of the weights.
        token_ids:
            The opening.
        rows, known:
            ``[T, layers, experts_per_token]`` and ``[T]``, from its first token on; ``T`` may be less than its length.
        """
        found: list[Block] = []
        if salt < self._newest - self._keep:
            return found
        for start, digest in self._digests(token_ids[: len(rows)]):
            key, part = (salt, digest), slice(start, start + self._block)
            # a copy: a view would keep the whole answer
            found.append((key, rows[part].copy() if key not in self._blocks and known[part].all() else None))
        return found

    def keep(self, salt: int, blocks: Iterable[Block]) -> None:
        """Add blocks of a salt; blocks that the store has already are kept."""
        if salt > self._newest:
            self._newest = salt
            for key in [key for key in self._blocks if key[0] < salt - self._keep]:
                self._drop(key)
        if salt < self._newest - self._keep:
            return
        for key, rows in blocks:
            if key in self._blocks:
                self._blocks.move_to_end(key)
            elif rows is not None:
                self._blocks[key] = rows
                self.bytes += rows.nbytes
        while self.bytes > self._limit:
            self._drop(next(iter(self._blocks)))

    def fill(
        self, salt: int, token_ids: Tokens, rows: NDArray[np.unsignedinteger], known: NDArray[np.bool_]
    ) -> list[tuple[Name, int]]:
        """Put rows in where none are known, in place: names of the blocks that had some, each with how many.

        Arrays are as in `blocks_of`, and of any length. The store is not changed, so that this, too, may be a thread's;
        `used` is for the event loop.
        """
        filled = []
        for start, digest in self._digests(token_ids):
            part = slice(start, start + self._block)
            missing = ~known[part]
            if not missing.any() or (found := self._blocks.get((salt, digest))) is None:
                continue
            rows[part][missing], known[part] = found[missing], True
            filled.append(((salt, digest), int(missing.sum())))
        return filled

    def used(self, names: Iterable[Name]) -> None:
        """Note the use of blocks, of which some may have gone meanwhile."""
        for name in names:
            if name in self._blocks:
                self._blocks.move_to_end(name)

    def _drop(self, key: Name) -> None:
        self.bytes -= self._blocks.pop(key).nbytes

    def _digests(self, token_ids: Tokens) -> Iterator[tuple[int, bytes]]:
        """Yield the first token of each whole block, and a digest of it and all tokens before it."""
        data, width = np.asarray(token_ids, np.int64).tobytes(), 8 * self._block
        running = hashlib.blake2b(digest_size=16)
        for end in range(width, len(data) + 1, width):
            running.update(data[end - width : end])
            yield end // 8 - self._block, running.digest()
