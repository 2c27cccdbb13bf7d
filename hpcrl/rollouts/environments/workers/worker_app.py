"""HTTP side of a worker: processes of environments, a stream that shows that it lives, and its health.

``GET /health``
    200 once each environment has given a prompt.
``GET /watch``
    Two lines a second, as long as the worker lives and its environments are there.
``GET /environments/NAME``
    WebSocket with the process of an environment: a message each way is one of `hpcrl.rollouts.environments.wire`, after
    ``Built``. Text of the worker says why the process is gone; the text ``stacks`` of the client asks for its stacks.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping

from aiohttp import web

from hpcrl.network.auth import Gate
from hpcrl.network.http_server import listen, make_runner, stop_serving
from hpcrl.rollouts.environments import wire
from hpcrl.rollouts.environments.workers.hosting import EnvironmentHost

BEAT_S = 0.5
"""Seconds between two lines of ``/watch``."""


def worker_app(hosts: Mapping[str, EnvironmentHost], gate: Gate) -> web.Application:
    """Return the web application of a worker with these environments, by name."""

    def missing() -> str:
        return ", ".join(name for name, host in hosts.items() if not host.ready)

    async def health(_: web.Request) -> web.Response:
        if names := missing():
            return web.Response(status=503, text=f"not ready: {names}")
        return web.Response(text="ok")

    async def watch(request: web.Request) -> web.StreamResponse:
        if names := missing():
            return web.Response(status=503, text=f"not ready: {names}")
        response = web.StreamResponse()
        await response.prepare(request)
        with contextlib.suppress(OSError):
            while True:
                await response.write(b"\n")
                await asyncio.sleep(BEAT_S)
        return response

    async def environment(request: web.Request) -> web.StreamResponse:
        host = hosts.get(request.match_info["name"])
        if host is None:
            return web.Response(status=404, text="there is no such environment")
        socket = web.WebSocketResponse(compress=False, max_msg_size=wire.MAX_MESSAGE_BYTES)
        await socket.prepare(request)
        await host.serve(socket)
        return socket

    app = web.Application(middlewares=[gate.middleware()])
    app.add_routes([web.get("/health", health), web.get("/watch", watch), web.get("/environments/{name}", environment)])
    return app


@contextlib.asynccontextmanager
async def serve_worker(hosts: Mapping[str, EnvironmentHost], gate: Gate, *, host: str, port: int) -> AsyncIterator[int]:
    """Serve environments inside the context; gives the port.

    Raises
    ------
    OSError
        The port cannot be bound.
    """
    runner = make_runner(worker_app(hosts, gate), handler_cancellation=True, shutdown_timeout=0.2)
    await runner.setup()
    try:
        yield await listen(runner, gate.pending, (host, port))
    finally:
        await stop_serving(runner)
        for each in hosts.values():
            await each.aclose()
