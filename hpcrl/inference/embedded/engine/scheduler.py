"""Schedules tokens of sequences for the next step: continuous batching with chunked prefill.

Sequences join when there is a row, KV blocks for all their known tokens and token budget; they leave when they
finish. Where blocks run out, the sequence that was to be served last gives its blocks back and is computed
again later; the one that was first always continues, so there is progress whatever the load.
"""

from __future__ import annotations

import itertools
from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpcrl.inference.embedded.engine.blocks import BlockPool
from hpcrl.inference.embedded.engine.request import EngineRequest
from hpcrl.inference.embedded.engine.rows import Rows


@dataclass(frozen=True, slots=True)
class Step:
    """Work of the model in one step: sequences, their tokens, their places in the cache.

    Attributes
    ----------
    rows:
        Scheduled rows, those with a single token first.
    counts:
        Tokens to compute of each.
    num_single:
        Number of rows with a single token.
    admitted:
        Requests that start (or start again) with this step.
    """

    rows: NDArray[np.int64]
    counts: NDArray[np.int64]
    num_single: int
    admitted: list[EngineRequest]


class Scheduler:
    """Waiting queue, running rows and their blocks. Used on the model thread only."""

    def __init__(
        self,
        rows: Rows,
        pool: BlockPool,
        *,
        load_blocks: Callable[[list[bytes], list[bytes]], list[int]],
        max_num_batched_tokens: int,
        vocab_size: int,
        draw_seed: Callable[[], int],
    ) -> None:
        """Start with nothing to do.

        Parameters
        ----------
        rows, pool:
            Owned by the scheduler from now on. The pool must hold one sequence of maximal length, else a
            sequence could wait forever.
        load_blocks:
            Takes free blocks of the pool, and fills them with what other engines computed (`CachedBlocks.load`).
        max_num_batched_tokens:
            Tokens of a step; at least the number of rows, so that decoding never waits for prefill.
        vocab_size:
            Vocabulary size of the model.
        draw_seed:
            A fresh 63-bit seed for a request without its own.
        """
        assert pool.num_blocks >= rows.max_blocks
        self._rows, self._pool, self._budget = rows, pool, max_num_batched_tokens
        self._load_blocks = load_blocks
        self._vocab_size, self._draw_seed = vocab_size, draw_seed
        self._block_size = rows.block_size
        self.waiting: list[EngineRequest] = []
        self.running: list[int] = []
        self._arrivals = itertools.count(1)
        self.num_preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        #: since they were last taken: blocks of requests with a salt that a step filled, and their names
        self.filled: list[tuple[int, bytes]] = []
        #: since they were last taken: requests that could not be started, which are not in the engine any more
        self.refused: list[tuple[EngineRequest, Exception]] = []

    def add(self, request: EngineRequest) -> None:
        """Queue a request after those of its priority."""
        request.sequence_number = next(self._arrivals)
        insort(self.waiting, request, key=lambda r: r.sort_key)

    def requests(self) -> Iterator[EngineRequest]:
        """Yield all requests in the engine."""
        yield from self.waiting
        yield from self.requests_running()

    def requests_running(self) -> Iterator[EngineRequest]:
        """Yield the requests that hold a row."""
        for row in self.running:
            yield self._rows.request(row)

    @property
    def has_requests(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def has_preempted(self) -> bool:
        """Return whether a preempted request waits to continue."""
        return any(request.num_preemptions for request in self.waiting)

    def schedule(self, *, only_preempted: bool, alone: EngineRequest | None = None) -> Step | None:
        """Choose the tokens of the next step and give them blocks; None where there is nothing to run.

        Parameters
        ----------
        only_preempted:
            Whether only those waiting requests may run that had started before.
        alone:
            The one request that may run, where no other runs; None: all may.
        """
        running = np.asarray(self.running, np.int64)
        pending = self._rows.num_tokens[running] - self._rows.num_computed[running]
        counts = np.minimum(pending, 1)
        budget = self._budget - int(counts.sum())
        for i in np.flatnonzero(pending > 1).tolist():
            extra = min(int(pending[i]) - 1, budget)
            counts[i] += extra
            budget -= extra
        preempted = self._grow(running, counts)
        admitted: list[EngineRequest] = []
        if preempted:
            running, counts = running[counts > 0], counts[counts > 0]
        elif self.waiting:
            started = list(self._admit(budget, only_preempted=only_preempted, alone=alone))
            admitted = [self._rows.request(row) for row, _ in started]
            running = np.concatenate((running, np.asarray([row for row, _ in started], np.int64)))
            counts = np.concatenate((counts, np.asarray([count for _, count in started], np.int64)))
        if not len(running):
            return None
        single = counts == 1
        order = np.concatenate((np.flatnonzero(single), np.flatnonzero(~single)))
        return Step(running[order], counts[order], int(single.sum()), admitted)

    def _grow(self, running: NDArray[np.int64], counts: NDArray[np.int64]) -> bool:
        """Allocate the blocks that ``counts`` tokens need; preempted rows get a count of 0."""
        rows, size = self._rows, self._block_size
        wanted = (rows.num_computed[running] + counts + size - 1) // size - rows.num_blocks[running]
        preempted = False
        for i in np.flatnonzero(wanted > 0).tolist():
            row, need = int(running[i]), int(wanted[i])
            while counts[i] and self._pool.num_free < need:
                victim = max(self.running, key=lambda r: rows.request(r).sort_key)
                counts[np.flatnonzero(running == victim)] = 0
                self._preempt(victim)
                preempted = True
            if counts[i]:
                rows.append_blocks(row, self._pool.allocate(need))
        return preempted

    def _admit(self, budget: int, *, only_preempted: bool, alone: EngineRequest | None) -> Iterator[tuple[int, int]]:
        """Start waiting requests; yields rows and their first counts of tokens."""
        while self.waiting and self._rows.num_free and budget:
            index = next((i for i, r in enumerate(self.waiting) if self._may_start(r, only_preempted, alone)), None)
            if index is None:
                return
            request = self.waiting[index]
            try:
                started = self._start(request, budget)
            except Exception as error:  # noqa: BLE001 - whatever is wrong with this request is not the others' to bear
                self.waiting.remove(request)
                self.refused.append((request, error))
                continue
            if started is None:
                return
            self.waiting.remove(request)
            budget -= started[1]
            yield started

    @staticmethod
    def _may_start(request: EngineRequest, only_preempted: bool, alone: EngineRequest | None) -> bool:
        return (alone is None or request is alone) and (not only_preempted or request.num_preemptions > 0)

    def _start(self, request: EngineRequest, budget: int) -> tuple[int, int] | None:
        """Give a waiting request a row and blocks; None where it does not fit yet. What raises has changed nothing."""
        rows, pool, size = self._rows, self._pool, self._block_size
        n = len(request.tokens)
        request.extend_hashes(request.tokens, size)
        # at least one token must be computed, because its logits are needed
        usable = 0 if request.params.skip_reading_prefix_cache else (n - 1) // size
        shared = pool.match(request.hashes[:usable])
        # a sequence starts when all of it fits, or it would be preempted half-way by its own chunks
        if -(-n // size) - len(shared) > pool.num_free - pool.num_free_among(shared):
            return None
        if request.params.seed is None and request.drawn_seed is None:
            request.drawn_seed = self._draw_seed()
        seed = request.drawn_seed if request.params.seed is None else request.params.seed
        assert seed is not None
        pool.share(shared)
        blocks = list(shared)
        try:
            blocks += self._load(request, request.hashes[len(shared) : usable])
            cached = len(blocks) * size
            row = rows.occupy(request, blocks, cached, seed, self._vocab_size)
        except BaseException:
            pool.release(blocks)
            raise
        if request.num_preemptions == 0:
            self.prefix_queries += n
            self.prefix_hits += len(shared) * size
            request.num_cached_tokens = cached
            request.num_fetched_tokens = cached - len(shared) * size
        self.running.append(row)
        count = min(n - cached, budget)
        rows.append_blocks(row, pool.allocate(-(-(cached + count) // size) - len(blocks)))
        return row, count

    def _load(self, request: EngineRequest, keys: list[bytes]) -> list[int]:
        """Fill blocks with what other engines computed of a sequence, if that extends its cached prefix."""
        contents = []
        for key in keys:
            if (content := request.fetched.get(key)) is None:
                break
            contents.append(content)
        request.fetched = {}
        return self._load_blocks(keys[: len(contents)], contents)

    def advance(self, step: Step) -> None:
        """Record that the tokens of a step were computed; full blocks become findable."""
        rows, size = self._rows, self._block_size
        before = rows.num_computed[step.rows]
        after = before + step.counts
        rows.num_computed[step.rows] = after
        crossed = np.flatnonzero(after // size > before // size)
        for i in crossed.tolist():
            row = int(step.rows[i])
            request = rows.request(row)
            request.extend_hashes(rows.tokens[row, : after[i]], size)
            for block in range(int(before[i]) // size, int(after[i]) // size):
                self._pool.register(int(rows.block_table[row, block]), request.hashes[block])
                if request.salted:
                    self.filled.append((int(rows.block_table[row, block]), request.hashes[block]))

    def remove(self, request: EngineRequest) -> None:
        """Take a request out, wherever it is; its blocks become free, its tokens stay in it."""
        if request.row is None:
            self.waiting.remove(request)
        else:
            self._leave(request.row)

    def distrust(self, request: EngineRequest) -> None:
        """Exclude the KV of a running request from reuse: the model that computed it is broken."""
        if request.row is not None:
            self._pool.forget(self._rows.blocks(request.row))

    def put_back(self, request: EngineRequest) -> None:
        """Put a running request back into the queue; others are left alone."""
        if request.row is not None:
            self._preempt(request.row)

    def preempt_all(self) -> None:
        """Put every running request back into the queue; their KV is computed again, also what others computed."""
        for request in self.waiting:
            request.fetched = {}
        for row in list(self.running):
            self._preempt(row)

    def _preempt(self, row: int) -> None:
        request = self._rows.request(row)
        self._leave(row)
        request.num_preemptions += 1
        request.prompt_logprobs.clear()
        self.num_preemptions += 1
        insort(self.waiting, request, key=lambda r: r.sort_key)

    def _leave(self, row: int) -> None:
        self._pool.release(self._rows.blocks(row))
        self._rows.vacate(row)
        self.running.remove(row)
