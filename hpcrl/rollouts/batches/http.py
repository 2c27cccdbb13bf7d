"""HTTP side of the dock; the endpoints are documented with their client, `hpcrl.dock.client`.

Waiting requests are held for a few seconds and then answered 204, so that a caller notices immediately when this
process is gone and never needs a long timeout.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Protocol

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from hpcrl.network.auth import Gate
from hpcrl.network.http_server import listen, make_runner, stop_serving
from hpcrl.rollouts.batches.server import ConflictError

_MAX_WAIT_S = 30.0


class Dock(Protocol):
    """Handlers of the HTTP endpoints. A `ConflictError` becomes status 409."""

    stopping: bool

    async def batch(self, step: int, *, rank: int, world_size: int, wait_s: float, ahead: bool) -> bytes | None:
        """Return one shard; None where it is not ready within ``wait_s`` seconds.

        ``ahead`` is true while the step before ``step`` is still being trained.
        """
        ...

    async def trained(self, step: int) -> None:
        """Note that ``step`` is trained and that the trainer waits for the next batch."""
        ...

    async def published(self, version: int) -> None:
        """Note that the weights of ``version`` are on the shared filesystem."""
        ...

    async def snapshot(self, step: int) -> bytes:
        """Return the encoded state after ``step``."""
        ...

    async def finish(self, version: int, *, wait_s: float) -> bool:
        """Return whether the last version is evaluated; wait up to ``wait_s`` seconds for it."""
        ...

    async def evaluate(self, key: str, given: str, *, seed: int, wait_s: float) -> bytes | None:
        """Return the result of the evaluation ``key`` of the set ``given``; None where it is not there yet."""
        ...

    def metrics(self) -> str:
        """Return the orchestrator's metrics as Prometheus text."""
        ...

    async def run_metrics(self) -> str:
        """Return the metrics of all parts of the run as Prometheus text."""
        ...


def dock_app(dock: Dock, gate: Gate) -> web.Application:
    """Return the web application, which serves only clients that ``gate`` accepts."""
    app = web.Application(middlewares=[gate.middleware(), _errors(dock)], client_max_size=1 << 20)
    app.add_routes(_routes(dock))
    return app


@contextlib.asynccontextmanager
async def serve_dock(dock: Dock, gate: Gate, *, host: str, port: int) -> AsyncIterator[None]:
    """Serve ``dock`` inside the context.

    Raises
    ------
    OSError
        The port cannot be bound.
    """
    app = dock_app(dock, gate)
    # handlers only wait for this process, so nothing is lost when they end with it
    runner = make_runner(app, handler_cancellation=True, shutdown_timeout=0.2)
    await runner.setup()
    try:
        await listen(runner, gate.pending, (host, port))
        yield
    finally:
        await stop_serving(runner)


def _errors(dock: Dock) -> Middleware:
    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if dock.stopping and request.path.startswith("/dock/"):
            return web.Response(status=410, text="the orchestrator is stopping")
        try:
            return await handler(request)
        except ConflictError as error:
            return web.Response(status=409, text=str(error))
        except (KeyError, ValueError) as error:
            return web.Response(status=400, text=f"{type(error).__name__}: {error}")

    return middleware


def _wait_s(request: web.Request) -> float:
    return min(_MAX_WAIT_S, max(0.0, float(request.query.get("wait_s", "0"))))


def _number(request: web.Request, name: str) -> int:
    return int(request.match_info[name])


def _routes(dock: Dock) -> list[web.RouteDef]:
    async def health(_: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=dock.metrics())

    async def run_metrics(_: web.Request) -> web.Response:
        return web.Response(text=await dock.run_metrics(), content_type="text/plain")

    async def batch(request: web.Request) -> web.Response:
        rank, world_size = int(request.query["rank"]), int(request.query["world_size"])
        ahead = request.query.get("ahead") == "1"
        shard = await dock.batch(
            _number(request, "step"), rank=rank, world_size=world_size, wait_s=_wait_s(request), ahead=ahead
        )
        if shard is None:
            return web.Response(status=204)
        return web.Response(body=shard, content_type="application/msgpack")

    async def trained(request: web.Request) -> web.Response:
        await dock.trained(_number(request, "step"))
        return web.Response(text="ok")

    async def published(request: web.Request) -> web.Response:
        await dock.published(_number(request, "version"))
        return web.Response(text="ok")

    async def snapshot(request: web.Request) -> web.Response:
        state = await dock.snapshot(_number(request, "step"))
        return web.Response(body=state, content_type="application/msgpack")

    async def finish(request: web.Request) -> web.Response:
        done = await dock.finish(_number(request, "version"), wait_s=_wait_s(request))
        # a caller that asks without waiting must not spin
        await asyncio.sleep(0)
        return web.Response(status=200 if done else 204)

    async def evaluate(request: web.Request) -> web.Response:
        query = request.query
        found = await dock.evaluate(
            request.match_info["key"], query["set"], seed=int(query["seed"]), wait_s=_wait_s(request)
        )
        await asyncio.sleep(0)
        return web.Response(status=204) if found is None else web.Response(body=found, content_type="application/json")

    return [
        web.get("/health", health),
        web.get("/metrics", metrics),
        web.get("/metrics/run", run_metrics),
        web.get(r"/dock/batch/{step:\d+}", batch),
        web.post(r"/dock/trained/{step:\d+}", trained),
        web.post(r"/dock/published/{version:\d+}", published),
        web.post(r"/dock/snapshot/{step:\d+}", snapshot),
        web.post(r"/dock/finish/{version:\d+}", finish),
        web.post(r"/dock/evaluate/{key:[0-9a-f]{32}}", evaluate),
    ]
