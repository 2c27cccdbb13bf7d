"""An engine in a process of its own that only answers, for benches of what its answers cost; not a bench itself."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

from aiohttp import web

from hpcrl.network.ports import choose_blocks
from hpcrl.rollouts.engines.client import EngineClient

HOST = "127.0.0.1"


async def serve(
    generate: Callable[[web.Request], Awaitable[web.StreamResponse]], port: int, *more: web.RouteDef
) -> None:
    """Answer requests to generate by ``generate``, and others by ``more``, for ever."""

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    app = web.Application(client_max_size=1 << 26)
    app.add_routes([web.post("/inference/v1/generate", generate), web.get("/health", health), *more])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, HOST, port).start()
    await asyncio.Event().wait()


@contextlib.contextmanager
def started(bench: str) -> Iterator[tuple[int, int]]:
    """Port and pid of ``bench --serve PORT``, which is ended behind."""
    (port,) = choose_blocks([1], first=21000, last=29999, host=HOST)
    server = subprocess.Popen([sys.executable, bench, "--serve", str(port)])
    try:
        yield port, server.pid
    finally:
        server.kill()
        server.wait()


async def reached(client: EngineClient) -> None:
    """Wait until it answers."""
    deadline = time.monotonic() + 60.0
    while not await client.healthy(timeout_s=5.0):
        assert time.monotonic() < deadline, "the engine does not answer within 60 s"
        await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def lateness() -> AsyncIterator[list[float]]:
    """By how many seconds the event loop was late, every 2 ms."""
    late: list[float] = []

    async def watch() -> None:
        while True:
            due = time.perf_counter() + 0.002
            await asyncio.sleep(0.002)
            late.append(time.perf_counter() - due)

    watching = asyncio.create_task(watch())
    try:
        yield late
    finally:
        watching.cancel()
