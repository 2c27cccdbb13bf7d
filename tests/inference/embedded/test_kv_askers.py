"""What an engine asks others for, and how much it gives to the pool: with stand-ins for both ends."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hpcrl.inference.embedded.engine.params import SamplingParams
from hpcrl.inference.embedded.engine.request import EngineRequest
from hpcrl.inference.embedded.kv import pool as kv_pool
from hpcrl.inference.embedded.kv.fetching import KvFetcher
from hpcrl.inference.embedded.kv.pool import KvPool
from hpcrl.inference.embedded.kv.sealing import BlockFormat
from hpcrl.inference.metrics import EngineMetrics, Registry

BLOCK = 4
QUERIES = "vllm:external_prefix_cache_queries_total"


class AskedPool:
    """Has every block, and notes how many it is asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    async def fetch(self, keys: Sequence[bytes]) -> list[bytes]:
        self.asked.append(len(keys))
        return [b"block"] * len(keys)


class EmptyEngine:
    """An engine that has nothing in its cache."""

    config = SimpleNamespace(block_size=BLOCK)
    cached = SimpleNamespace(count=lambda keys: 0, format=BlockFormat("a layout", 8))

    def call(self, function: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        answer.set_result(function())
        return answer


@pytest.mark.parametrize(
    ("there_is_a_pool", "skip", "salt", "asked"),
    [
        (True, False, "1", 2),
        (True, True, "1", 0),
        (True, False, None, 0),
        (False, False, "1", 0),
        (False, True, "1", 0),
    ],
)
async def test_only_who_may_read_a_prefix_asks_for_it(
    there_is_a_pool: bool, skip: bool, salt: str | None, asked: int
) -> None:
    """Nine tokens are two blocks of four and one that is computed; what nobody is asked for is not counted."""
    metrics, pool = EngineMetrics(registry := Registry({})), AskedPool()
    fetcher = KvFetcher(
        cast(Any, EmptyEngine()), cast(Any, None), metrics, cast(KvPool, pool) if there_is_a_pool else None
    )
    params = SamplingParams(max_tokens=1, prompt_logprobs=0 if skip else None)
    request = EngineRequest("asks", list(range(9)), params, lambda output: None, cache_salt=salt)
    await fetcher.fetch([request], None)
    assert pool.asked == ([asked] if asked else [])
    assert len(request.fetched) == asked
    looked_up = next(line for line in registry.render().splitlines() if line.startswith(f"{QUERIES}{{"))
    assert float(looked_up.rpartition(" ")[2]) == asked * BLOCK


class HeldStore:
    """A store of the pool's client that keeps each call until it may go on."""

    def __init__(self) -> None:
        self.may_go_on, self.put = threading.Event(), list[str]()

    def setup(self, *arguments: Any, **options: Any) -> int:
        return 0

    def put_batch(self, names: list[str], contents: list[bytes]) -> int:
        assert self.may_go_on.wait(20)
        self.put += names
        return 0

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> HeldStore:
    store = HeldStore()
    monkeypatch.setattr(kv_pool, "load_client", lambda: SimpleNamespace(MooncakeDistributedStore=lambda: store))
    return store


def test_blocks_that_a_slow_pool_does_not_take_are_dropped(held: HeldStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes on their way are bounded; where they have arrived there is room again."""
    monkeypatch.setattr(kv_pool, "_MOST_QUEUED_BYTES", 250)
    names = ("metadata_server", "protocol", "device_name", "master_server_address", "tenant_id")
    settings = {**dict.fromkeys(names, ""), "global_segment_size": 0, "local_buffer_size": 1 << 20}
    pool = KvPool(settings, "127.0.0.1", BlockFormat("a layout", 100), failed=lambda kind: None)
    keys = [bytes([number]) * 16 for number in range(5)]
    for key in keys[:3]:
        pool.put_soon([(key, bytes(100))])
    # the third would make it 300
    held.may_go_on.set()
    pool._putter.submit(lambda: None).result(20)
    assert held.put == [key.hex() for key in keys[:2]]
    held.put.clear()
    pool.put_soon([(keys[3], bytes(100)), (keys[4], bytes(100))])
    pool._putter.submit(lambda: None).result(20)
    assert held.put == [key.hex() for key in keys[3:]]
    pool.close()
