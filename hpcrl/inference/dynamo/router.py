"""``python -m hpcrl.inference.dynamo.router``: requests go on to the engine that Dynamo chooses, as they are.

Its admin calls are vllm-router's (``/workers``, ``/add_worker``, ``/remove_worker``, ``/liveness``), so that either
stands between the orchestrator and the same engines. Metrics have a port of their own, the next one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import aiohttp
import msgspec
from aiohttp import web

from hpcrl.errors import ExitCode, HpcrlError, MissingExtraError
from hpcrl.inference.dynamo.selection import CandidateEngine, EngineChoice, NoEngineError, Selection
from hpcrl.inference.metrics import Counter, Gauge, Registry
from hpcrl.network.auth import Gate
from hpcrl.network.connection_limits import raise_descriptor_limit
from hpcrl.network.generate_frames import MEDIA_TYPE
from hpcrl.network.http_body import receive_body
from hpcrl.network.http_server import listen, make_runner, stop_serving
from hpcrl.processes.daemon_threads import run_process
from hpcrl.processes.signals import handle_signals
from hpcrl.reporting.log_format import start_logging
from hpcrl.runs.refusals import gate_from_env
from hpcrl.storage.msgspec_types import decode_json

_log = logging.getLogger(__name__)

_MAX_BODY_BYTES = 256 << 20
_MAX_ANSWER_BYTES = 1 << 30
"""Maximum size of an answer that comes as a whole: log-probabilities and routed experts of 131,072 tokens as text take
some 140 MB. Streamed answers are forwarded part by part."""
_CONNECT_S = 10.0
_FAILURES = 2
"""Consecutive failed health checks after which an engine is not chosen."""
_KEEP_S = 2.0
"""Seconds that an idle connection is kept: below the 5 s after which vLLM's server closes one, maybe mid-request."""
_FORWARDED = ("accept", "content-type", "x-session-id")
_STREAMED = ("text/event-stream", MEDIA_TYPE)
"""Content types of answers that are streamed or large."""


class _Prompt(msgspec.Struct):
    """Fields of a request by which it is routed."""

    token_ids: list[Annotated[int, msgspec.Meta(ge=0, lt=2**32)]]
    cache_salt: str | None = None


class Front:
    """The HTTP side of the router."""

    def __init__(self, selection: Selection, http: aiohttp.ClientSession, *, timeout_s: float, health_s: float) -> None:
        """Prepare; nothing is sent.

        Parameters
        ----------
        timeout_s:
            Timeout in seconds for an engine's answer, or for the next part of it.
        health_s:
            Between two health checks.
        """
        self._selection, self._http = selection, http
        self._timeout_s, self._health_s = timeout_s, health_s
        self._registry = Registry({})
        add = self._registry.add
        self._requests = add(Counter("hpcrl_router_requests", "Requests sent to an engine.", "worker"))
        self._tokens = add(Counter("hpcrl_router_prompt_tokens", "Tokens of their prompts.", "worker"))
        self._cached = add(Counter("hpcrl_router_cached_tokens", "Of these, in the cache of the engine.", "worker"))
        add(Gauge("hpcrl_router_workers", "Engines that can be chosen.", lambda: len(self._healthy())))

    def routes(self) -> list[web.RouteDef]:
        """Return the routes for requests and admin calls."""
        return [
            web.post("/inference/v1/generate", self._generate),
            web.get("/workers", self._list),
            web.post("/add_worker", self._add),
            web.post("/remove_worker", self._remove),
            web.get("/liveness", self._alive),
            web.get("/health", self._health),
        ]

    def metrics_routes(self) -> list[web.RouteDef]:
        """Return the routes of the port for metrics."""
        return [web.get("/metrics", self._metrics)]

    async def watch(self) -> None:
        """Check engines' health periodically; one that does not answer is not chosen until it does. Never returns."""
        while True:
            await asyncio.sleep(self._health_s)
            await asyncio.gather(*(self._look_at(worker) for worker in list(self._selection.workers.values())))

    # -- engines

    async def _look_at(self, worker: CandidateEngine) -> None:
        problem = await self._problem(worker.url)
        if self._selection.workers.get(worker.url) is not worker:
            return  # removed meanwhile
        if problem is None:
            worker.failures = 0
            await self._selection.enter(worker)
            return
        worker.failures += 1
        if worker.failures == _FAILURES:
            _log.warning("%s is not chosen any more: %s", worker.url, problem)
        if worker.failures >= _FAILURES:
            await self._selection.leave(worker)

    async def _problem(self, url: str) -> str | None:
        """Return why an engine cannot be used; None if it can."""
        timeout = aiohttp.ClientTimeout(total=max(5.0, self._health_s))
        try:
            async with self._http.get(f"{url}/health", timeout=timeout, allow_redirects=False) as answer:
                return None if answer.status == 200 else f"/health answered {answer.status}"
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            return str(error) or type(error).__name__

    def _healthy(self) -> list[CandidateEngine]:
        return [worker for worker in self._selection.workers.values() if worker.number is not None]

    async def _add(self, request: web.Request) -> web.Response:
        url = _url(request)
        if url in self._selection.workers:
            return web.Response(text=f"{url} is known")
        if (problem := await self._problem(url)) is not None:
            return web.Response(status=503, text=f"{url}: {problem}")
        worker = self._selection.workers.setdefault(url, CandidateEngine(url))
        await self._selection.enter(worker)
        return web.Response(text=f"{url} is added")

    async def _remove(self, request: web.Request) -> web.Response:
        url = _url(request)
        worker = self._selection.workers.pop(url, None)
        if worker is None:
            return web.Response(text=f"{url} is not known")
        await self._selection.leave(worker)
        return web.Response(text=f"{url} is removed")

    async def _list(self, _: web.Request) -> web.Response:
        known = self._selection.workers.values()
        workers = [{"url": w.url, "is_healthy": w.number is not None, "load": w.load} for w in known]
        return web.json_response({"workers": workers})

    async def _alive(self, _: web.Request) -> web.Response:
        return web.Response(text="alive")

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(text="") if self._healthy() else web.Response(status=503, text="no engine can be chosen")

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=self._registry.render())

    # -- requests

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        try:
            prompt = decode_json(body, _Prompt)
        except msgspec.DecodeError as error:
            return web.Response(status=400, text=f"the request cannot be read: {error}")
        session = request.headers.get("x-session-id")
        try:
            async with self._selection.chosen(prompt.token_ids, salt=prompt.cache_salt, session=session) as choice:
                url = choice.worker.url
                self._requests.inc(value=url)
                self._tokens.inc(len(prompt.token_ids), value=url)
                self._cached.inc(choice.cached_tokens, value=url)
                return await self._forward(request, body, choice)
        except NoEngineError as error:
            return web.Response(status=503, text=str(error))

    async def _forward(self, request: web.Request, body: bytes, choice: EngineChoice) -> web.StreamResponse:
        """Forward the engine's answer as it arrives.

        It is cancelled when the client disconnects; the engine then aborts the request.
        """
        headers = {name: request.headers[name] for name in _FORWARDED if name in request.headers}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=self._timeout_s)
        parts: web.StreamResponse | None = None
        try:
            url = f"{choice.worker.url}{request.path}"
            async with self._http.post(
                url, data=body, headers=headers, timeout=timeout, allow_redirects=False
            ) as answer:
                if answer.content_type not in _STREAMED:
                    content_type = {"content-type": answer.headers.get("content-type", "application/json")}
                    data = await receive_body(answer, _MAX_ANSWER_BYTES)
                    return web.Response(status=answer.status, body=data, headers=content_type)
                kind = {"content-type": answer.headers["content-type"]}
                parts = web.StreamResponse(status=answer.status, headers=kind)
                await parts.prepare(request)
                await self._hand_on(answer, parts, choice)
                return parts
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
            what = f"{choice.worker.url}: {str(error) or type(error).__name__}"
            _log.warning("a request failed: %s", what)
            if parts is None:
                return web.Response(status=502, text=what)
            # forwarded parts cannot be withdrawn: abort, so that the client sees that the answer is incomplete
            if request.transport is not None:
                request.transport.abort()
            return parts

    async def _hand_on(self, answer: aiohttp.ClientResponse, parts: web.StreamResponse, choice: EngineChoice) -> None:
        first = True
        async for data in answer.content.iter_any():
            if first:
                first = False
                await self._selection.prefilled(choice)
            await parts.write(data)
        await parts.write_eof()


def _url(request: web.Request) -> str:
    url = request.query.get("url", "").rstrip("/")
    if not url.startswith("http://"):
        raise web.HTTPBadRequest(text="name an engine: ?url=http://HOST:PORT")
    return url


def front_apps(front: Front, gate: Gate) -> tuple[web.Application, web.Application]:
    """Return the applications for requests and admin calls, and for metrics; ``gate`` authenticates their clients."""
    apps = []
    for routes in (front.routes(), front.metrics_routes()):
        app = web.Application(middlewares=[gate.middleware()], client_max_size=_MAX_BODY_BYTES)
        app.add_routes(routes)
        apps.append(app)
    return apps[0], apps[1]


async def _serve(settings: argparse.Namespace, gate: Gate) -> None:
    stop = asyncio.Event()
    handle_signals({signal.SIGTERM: stop.set, signal.SIGINT: stop.set})
    selection = Selection(
        model=settings.model,
        block_size=settings.block_size,
        events_offset=settings.events_offset,
        session_ttl_s=settings.session_ttl_s or None,
    )
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_S)
    async with contextlib.AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=connector, headers=gate.headers))
        front = Front(selection, http, timeout_s=settings.request_timeout_s, health_s=settings.health_interval_s)
        stack.push_async_callback(selection.close)
        requests, metrics = front_apps(front, gate)
        for port, app in ((settings.port + 1, metrics), (settings.port, requests)):
            runner = make_runner(app, handler_cancellation=True, shutdown_timeout=0.5)
            await runner.setup()
            stack.push_async_callback(stop_serving, runner)
            await listen(runner, gate.pending, (settings.host, port))
        watch = asyncio.create_task(front.watch())
        stack.callback(watch.cancel)
        _log.info("choosing engines on http://%s:%d", settings.host, settings.port)
        ended = asyncio.create_task(stop.wait())
        await asyncio.wait([watch, ended], return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if watch.done():
            watch.result()


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="hpcrl.inference.dynamo.router")
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True, help="port of requests; metrics are on the next port")
    parser.add_argument("--model", required=True, help="name that engines serve")
    parser.add_argument("--block-size", type=int, required=True, help="tokens of a KV block")
    parser.add_argument(
        "--events-offset", type=int, required=True, help="offset of the port of KV events to that of a server"
    )
    parser.add_argument(
        "--token-file", type=Path, help="outside of a run: accept only requests with the token in this file"
    )
    parser.add_argument(
        "--session-ttl-s", type=float, default=0.0, help="timeout of an idle session; 0 keeps no session on one engine"
    )
    parser.add_argument("--request-timeout-s", type=float, default=600.0)
    parser.add_argument("--health-interval-s", type=float, default=2.0)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGTERM.

    Returns
    -------
    int
        0 after SIGTERM or SIGINT, 1 where it failed, 2 where Dynamo is not installed.
    """
    settings = _parse(argv)
    start_logging("%(levelname)s %(message)s")
    # Dynamo warns whenever an engine joins or leaves
    os.environ.setdefault("DYN_LOG", "error")
    raise_descriptor_limit()
    try:
        gate = gate_from_env("router", token_file=settings.token_file)
        gate.check_host(settings.host)
        run_process(_serve(settings, gate))
    except ImportError as error:
        _log.error("%s", MissingExtraError("dynamo", error.name or "dynamo"))
        return ExitCode.USAGE
    except (HpcrlError, OSError) as error:
        _log.error("%s", error)
        return ExitCode.FAILED
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
