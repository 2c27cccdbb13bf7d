"""Embedded engines behind their HTTP servers, several in this process, asked as a router and others would."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import aiohttp
from aiohttp.test_utils import TestServer
from engine_helpers import decode_experts, forward, logprob_error

from hpcrl.inference.embedded.engine.config import EngineSettings
from hpcrl.inference.embedded.engine.engine import Engine
from hpcrl.inference.embedded.kv.fetching import KvFetcher
from hpcrl.inference.embedded.kv.pool import KvPool
from hpcrl.inference.embedded.kv.sealing import BlockFormat
from hpcrl.inference.embedded.serving.process import engine_app
from hpcrl.inference.embedded.serving.serving import ServedModel, Serving
from hpcrl.inference.metrics import EngineMetrics, Registry
from hpcrl.modeling.decoder import Decoder
from hpcrl.network.auth import Gate

TOLERANCE = 1e-4
BLOCK = 4
SIZES: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 256, "max_num_batched_tokens": 64, "block_size": BLOCK}


class Side:
    """An engine behind its HTTP server, both in this process.

    Attributes
    ----------
    url:
        Of the server.
    """

    def __init__(self, engine: Engine, server: TestServer, session: aiohttp.ClientSession, pool: KvPool | None) -> None:
        self.engine, self.server, self.session, self.pool = engine, server, session, pool
        self.url = f"http://127.0.0.1:{server.port}"

    async def ask(self, prompt: list[int], salt: str | None = "1", **request: Any) -> dict[str, Any]:
        """The answer to a request for eight tokens, or what ``request`` says."""
        sampling = {"max_tokens": 8, "temperature": 0.0, "logprobs": 0, "ignore_eos": True}
        sampling |= request.pop("sampling", {})
        body = {"token_ids": prompt, "sampling_params": sampling, "cache_salt": salt, **request}
        async with self.session.post(f"{self.url}/inference/v1/generate", json=body) as answer:
            assert answer.status == 200, await answer.text()
            return cast(dict[str, Any], await answer.json())

    async def hand_over(self, prompt: list[int], salt: str | None = "1") -> dict[str, Any]:
        """Compute a prompt, as a router asks for it; what the other side is told."""
        answer = await self.ask(prompt, salt, sampling={"max_tokens": 1}, kv_transfer_params={"do_remote_decode": True})
        # a router throws this answer away
        assert len(decode_experts(answer["choices"][0]["routed_experts"])) == 0
        return cast(dict[str, Any], answer["kv_transfer_params"])

    def count(self, name: str) -> float:
        """A counter, with its label where it has one."""
        lines = self.engine._metrics.registry.render().splitlines()
        return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} ")), 0.0)

    @property
    def fetched(self) -> tuple[float, float, float]:
        """Tokens whose KV was asked for elsewhere, those that were had, and prompts for which that failed."""
        asked, had = (self.count(f"vllm:external_prefix_cache_{name}_total{{}}") for name in ("queries", "hits"))
        failed = (self.count(f'hpcrl_engine_kv_fetch_failures_total{{source="{s}"}}') for s in ("prefill", "pool"))
        return asked, had, sum(failed)


@asynccontextmanager
async def side(
    model: Decoder,
    join: Callable[[BlockFormat, Callable[[str], None]], KvPool | None] = lambda form, failed: None,
    **changes: Any,
) -> AsyncIterator[Side]:
    """An engine; ``join`` makes its share in a pool, which tells of what failed."""
    metrics = EngineMetrics(Registry({}))
    config = EngineSettings(**{**SIZES, "num_blocks": 256, "return_routed_experts": True, **changes})
    engine = Engine(model, config, metrics)
    loop, pool = (
        asyncio.get_running_loop(),
        join(engine.cached.format, lambda kind: metrics.pool_failures.inc(value=kind)),
    )

    def deliver(delivery: Any) -> None:
        for request, output in delivery:
            loop.call_soon_threadsafe(request.on_output, output)

    async with aiohttp.ClientSession() as session:
        facts = ServedModel(names=("m",), root="m", eos_token_id=None)
        serving = Serving(engine, None, facts, KvFetcher(engine, session, metrics, pool))
        app = engine_app(Gate("engine", None), serving, cast(Any, None), metrics)
        engine.start(deliver, None if pool is None else pool.put_soon)
        async with TestServer(app) as server:
            yield Side(engine, server, session, pool)
    engine.stop()
    assert engine.failure is None
    if pool is not None:
        await asyncio.to_thread(pool.close)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(103) for _ in range(length)]


def check(model: Decoder, prompt: list[int], answer: dict[str, Any]) -> list[int]:
    """An answer is that of the plain model; the tokens of it."""
    choice = answer["choices"][0]
    tokens: list[int] = choice["token_ids"]
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert logprob_error(model, prompt, tokens, logprobs) < TOLERANCE
    expected, experts = forward(model, [*prompt, *tokens])
    assert expected[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens
    assert (decode_experts(choice["routed_experts"]) == experts[:-1]).all()
    return tokens


def whole(prompt: list[int]) -> int:
    """Tokens of whole blocks before the last token, which decode computes itself."""
    return (len(prompt) - 1) // BLOCK * BLOCK


def flipped(data: bytes) -> bytes:
    """With one bit wrong."""
    return data[:100] + bytes([data[100] ^ 1]) + data[101:]
