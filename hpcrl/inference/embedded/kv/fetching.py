"""Fetches KV of a prompt from others, before an engine begins a sequence, if it does not have it itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence

import aiohttp

from hpcrl.inference.embedded.engine.engine import Engine
from hpcrl.inference.embedded.engine.request import EngineRequest
from hpcrl.inference.embedded.kv.pool import KvPool
from hpcrl.inference.embedded.kv.prefill import fetch_from_prefill
from hpcrl.inference.metrics import EngineMetrics


class KvFetcher:
    """Fetches KV of prompts for one engine."""

    def __init__(
        self, engine: Engine, session: aiohttp.ClientSession, metrics: EngineMetrics, pool: KvPool | None = None
    ) -> None:
        """Prepare; ``session`` brings the token of the run. Session and pool are closed by their owner."""
        self._engine, self._session, self._metrics, self._pool = engine, session, metrics, pool

    async def fetch(self, requests: list[EngineRequest], prefill: tuple[str, int] | None) -> None:
        """Give requests with one prompt, which were not submitted, the blocks of it that others have.

        Parameters
        ----------
        prefill:
            Host and port of the engine that has computed the prompt; None if none has. The pool is asked for what it
            does not have.
        """
        first, size = requests[0], self._engine.config.block_size
        pool = self._pool if first.salted else None
        if (prefill is None and pool is None) or first.params.skip_reading_prefix_cache:
            return
        first.extend_hashes(first.tokens, size)
        # at least one token must be computed here, because its logits are needed
        keys = first.hashes[: (len(first.tokens) - 1) // size]
        cached = self._engine.cached
        keys = keys[await asyncio.wrap_future(self._engine.call(lambda: cached.count(keys))) :]
        if not keys:
            return
        self._metrics.external_queries.inc(len(keys) * size)
        blocks: list[bytes] = []
        if prefill is not None:
            blocks += await self._of("prefill", fetch_from_prefill(self._session, prefill, keys, cached.format))
        if pool is not None and (rest := keys[len(blocks) :]):
            blocks += await self._of("pool", pool.fetch(rest))
        fetched = dict(zip(keys, blocks, strict=False))
        for request in requests:
            request.fetched = fetched

    async def _of(self, source: str, fetch: Awaitable[Sequence[bytes] | None]) -> Sequence[bytes]:
        """Return the blocks that ``source`` gives, and count them; empty if it failed."""
        blocks = await fetch
        if blocks is None:
            self._metrics.fetch_failures.inc(value=source)
            return ()
        tokens = len(blocks) * self._engine.config.block_size
        self._metrics.external_hits.inc(tokens)
        self._metrics.fetched_tokens.inc(tokens, source)
        return blocks
