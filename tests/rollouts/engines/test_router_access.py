"""Real routers in front of engines that want the run's token, and what strangers and older attempts get of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import psutil
import pytest
from harness import make_run, running
from real_router import Router
from stub_engine import StubEngine, encode

from hpcrl.inference.vllm.front import front_flags
from hpcrl.network.auth import Gate
from hpcrl.network.credentials import Credentials
from hpcrl.runs.events import read_events
from hpcrl.runs.rundir import RunDir

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

REQUEST = {
    "model": "m",
    "token_ids": encode("spell word"),
    "sampling_params": {"temperature": 0.0, "seed": 0, "max_tokens": 64},
    "cache_salt": "0",
}
#: vllm-router hands the last two on to an engine
CALLS = ("POST /inference/v1/generate", "GET /workers", "GET /liveness", "GET /health", "POST /pause", "GET /v1/models")


@contextlib.asynccontextmanager
async def engines(run: RunDir, count: int) -> AsyncIterator[list[StubEngine]]:
    """As vLLM's servers are behind a router: health is for everybody."""
    started = []
    for number in range(count):
        stub = StubEngine()
        stub.gate = Gate(f"stub-{number}", Credentials.of_run(run.path, run.attempts()[-1]), open_health=True)
        await stub.start()
        started.append(stub)
    try:
        yield started
    finally:
        for stub in started:
            await stub.stop()


async def status(router: Router, call: str, headers: dict[str, str]) -> int:
    method, _, path = call.partition(" ")
    body = REQUEST if method == "POST" else None
    async with (
        aiohttp.ClientSession() as http,
        http.request(method, router.url + path, json=body, headers=headers) as it,
    ):
        await it.read()
        return it.status


def refused(stub: StubEngine) -> int:
    assert stub.gate is not None
    return stub.gate.refused


async def check_strangers(router: Router, run: RunDir, stubs: list[StubEngine], *, quiet: bool) -> None:
    """Nobody gets anything of the router, and nothing reaches an engine, but with the token of the attempt."""
    mine = Credentials.of_run(run.path, run.attempts()[-1])
    # an orchestrator that works goes on asking meanwhile, as one of the run
    before = [(len(stub.requests), list(stub.calls), refused(stub)) for stub in stubs]
    older = Credentials(mine.token, run.attempts()[-1] - 1)
    for headers in ({}, {"Authorization": "Bearer x"}, Credentials("0" * 64, mine.attempt).headers, older.headers):
        for call in CALLS:
            assert await status(router, call, headers) in (401, 403), (call, headers)
    after = [(len(stub.requests), list(stub.calls), refused(stub)) for stub in stubs]
    assert after == before if quiet else [each[-1] for each in after] == [each[-1] for each in before]
    assert await status(router, CALLS[0], mine.headers) == 200
    reasons = {event.data["reason"] for event in read_events(run, kind="access.refused")}
    assert reasons >= {"wrong_token", "other_attempt"}
    assert router.process is not None
    family = [psutil.Process(router.process.pid), *psutil.Process(router.process.pid).children(recursive=True)]
    for process in family:
        assert mine.token not in " ".join([*process.cmdline(), *process.environ().values()])


@pytest.mark.parametrize("kind", ["vllm-router", "dynamo"])
async def test_a_router_serves_its_run_alone(tmp_path: Path, kind: str) -> None:
    run = make_run(tmp_path)
    run.start_attempt()
    router = Router(tmp_path / "router.log", kind, run)
    async with engines(run, 2) as stubs:
        await asyncio.to_thread(router.start)
        try:
            async with running(run, *stubs, router=router.url) as loop:
                await loop.train(1, 2)
                await check_strangers(router, run, stubs, quiet=False)
                await loop.train(3, 3)
        finally:
            router.kill()


async def test_between_sides_it_speaks_in_the_name_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not hand on headers there; nor must a key of the user get to engines."""
    monkeypatch.setenv("OPENAI_API_KEY", "the user's own")
    run = make_run(tmp_path)
    run.start_attempt()
    router = Router(tmp_path / "router.log", "vllm-router", run)
    async with engines(run, 2) as stubs:
        flags = front_flags("nixl", [stubs[0].url], [stubs[1].url], bootstrap_offset=None)
        await asyncio.to_thread(router.start, *flags)  # it asks the engines first
        try:
            await check_strangers(router, run, stubs, quiet=True)
            assert all(stub.requests for stub in stubs)
        finally:
            router.kill()
