"""The HTTP side of the gateway. Each rollout has a path and a secret of its own, which hold while it runs.

===================================================  ================================================================
``POST /r/<rollout>/v1/chat/completions``            messages, tools and streams of OpenAI's API
``POST /r/<rollout>/v1/responses``                   the same in OpenAI's newer form; nothing is stored
``POST /r/<rollout>/v1/messages``                    the same in Anthropic's form
``GET  /r/<rollout>/v1/models``                      the policy, and the length of its context
``POST /r/<rollout>/inference/v1/generate``          token ids in and out, as verifiers' training client asks for them
===================================================  ================================================================

A program of a rollout knows nothing of others: unknown rollouts, ended ones and wrong secrets get the same answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Hashable
from typing import Any

import msgspec
import xxhash
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from hpcrl.network.auth import Gate, Report
from hpcrl.network.credentials import Refusal
from hpcrl.network.http_server import listen, make_runner, stop_serving
from hpcrl.network.interfaces import http_url
from hpcrl.reporting.log_limits import limit_logger
from hpcrl.rollouts.core.counters import Counters
from hpcrl.rollouts.environments.base import PolicyEndpoint
from hpcrl.rollouts.gateway.answers import ChatAnswer, models_body
from hpcrl.rollouts.gateway.anthropic_dialect import AnthropicDialect
from hpcrl.rollouts.gateway.dialects import Dialect
from hpcrl.rollouts.gateway.errors import GatewayError, bad_request
from hpcrl.rollouts.gateway.messages import ChatCompletionRequest, TokenRequest, read_request
from hpcrl.rollouts.gateway.recorder import RolloutRecorder
from hpcrl.rollouts.gateway.responses_dialect import ResponsesDialect
from hpcrl.rollouts.gateway.work_queue import WorkQueue
from hpcrl.rollouts.sampling.turn_sampler import TurnSampler

_log = logging.getLogger(__name__)

MODEL = "policy"
"""Name of the model. Requests may have any: there is one."""
_MAX_BODY = 16 << 20
"""Maximum size of the body of a request in bytes: several times a context of a million tokens."""
_BODY_S = 60.0
"""Maximum seconds in which the body of a request must arrive."""
_QUIET_S = 10.0
"""A stream says something so often, in seconds, while a turn is sampled: proxies and SDKs end silent connections."""
_MAX_NOTED = 64
"""Maximum number of overridden values that the log has."""
_PATH = "/r/{rollout}"
_DIALECTS: dict[str, Dialect] = {"responses": ResponsesDialect(), "messages": AnthropicDialect()}
"""Further forms of a conversation, by the last part of their path."""


class _RolloutGate(Gate):
    """Lets in who brings the secret of the rollout that a path names."""

    def __init__(self, *, report: Report) -> None:
        super().__init__("gateway", None, report=report)
        self.secrets: dict[str, str] = {}

    def refusal(
        self, method: str, path: str, authorization: str | None, peer: str, *, connection: Hashable = None
    ) -> Refusal | None:
        """See `hpcrl.network.auth.Gate.refusal`."""
        scheme, _, given = (authorization or "").strip().partition(" ")
        rollout = path.split("/")[2] if path.startswith("/r/") else ""
        # compared also where there is no such rollout: the time tells nothing
        wanted = self.secrets.get(rollout, "no such rollout")
        right = hmac.compare_digest(given.strip().encode("utf-8", "replace"), wanted.encode())
        if scheme.lower() == "bearer" and right and rollout in self.secrets:
            self.pending.admitted(connection)
            return None
        reason = "no_secret" if not given else "wrong_secret"
        self._tell(peer, method, path, reason)
        return Refusal(401, reason, "no running rollout has this path and key")


class Gateway:
    """Serves rollouts to programs, from the first one on that asks for an endpoint.

    It knows a rollout's path and secret alone, and never the run's token, which programs do not have.
    """

    def __init__(self, counters: Counters, *, report: Report = lambda refused: None, host: str = "127.0.0.1") -> None:
        """Prepare; nothing is served yet.

        Parameters
        ----------
        counters:
            Requests are counted there.
        report:
            Called for each request that is refused.
        host:
            Address of this machine at which it listens. By default only programs of this machine reach it.
        """
        self._host = host
        self._counters, self._gate, self._queue = counters, _RolloutGate(report=report), WorkQueue()
        self._recorders: dict[str, RolloutRecorder] = {}
        self._lengths: dict[str, int] = {}
        self._runner: web.AppRunner | None = None
        self._starting = asyncio.Lock()
        self._noted: set[tuple[str, str]] = set()
        self._port = 0

    @contextlib.asynccontextmanager
    async def serve(self, turns: TurnSampler) -> AsyncIterator[tuple[PolicyEndpoint, RolloutRecorder]]:
        """Serve one rollout inside the context. What runs when it is left is aborted at the engine.

        Raises
        ------
        OSError
            There is no port for the server.
        """
        await self._start()
        rollout, secret = secrets.token_hex(8), secrets.token_urlsafe(32)
        recorder = RolloutRecorder(turns, self._counters, queue=self._queue, on_unfollowed=self._note)
        self._gate.secrets[rollout] = secret
        self._recorders[rollout] = recorder
        self._lengths[rollout] = turns.sampler.max_model_len
        try:
            url = f"{http_url(self._host, self._port)}{_PATH.format(rollout=rollout)}/v1"
            yield PolicyEndpoint(url=url, key=secret, model=MODEL), recorder
        finally:
            del self._gate.secrets[rollout], self._recorders[rollout], self._lengths[rollout]
            await recorder.close()

    def gauges(self) -> dict[str, float]:
        """Return the length of the queue for the processor, and what calls have waited in it."""
        found = self._queue.summary()
        return {
            "gateway_waiting": found.waiting,
            "gateway_wait_p99_ms": 1e3 * found.p99_s,
            "gateway_waited_s": found.waited_s,
        }

    async def aclose(self) -> None:
        """End the server."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await stop_serving(runner)

    async def _start(self) -> None:
        async with self._starting:
            if self._runner is not None:
                return
            app = web.Application(
                middlewares=[_key_as_bearer, self._gate.middleware(), _errors, self._counting()],
                client_max_size=_MAX_BODY,
            )
            app.add_routes(
                [
                    web.get(f"{_PATH}/v1/models", self._models),
                    web.post(f"{_PATH}/v1/chat/completions", self._chat),
                    *(web.post(f"{_PATH}/v1/{name}", self._in_dialect) for name in _DIALECTS),
                    web.post(f"{_PATH}/inference/v1/generate", self._generate),
                    # a program's base URL may end with /v1 for this one, too
                    web.post(f"{_PATH}/v1/inference/v1/generate", self._generate),
                ]
            )
            # programs may repeat a request that fails as often as they like
            limit_logger(__name__)
            # who hangs up ends what it has asked for
            runner = make_runner(app, handler_cancellation=True, shutdown_timeout=0.2)
            await runner.setup()
            self._port = await listen(runner, self._gate.pending, (self._host, 0))
            self._runner = runner

    def _counting(self) -> Middleware:
        """Bound the requests of a rollout before their bodies are read: all of them take memory of this process."""

        @web.middleware
        async def counted(request: web.Request, handler: Handler) -> web.StreamResponse:
            if request.method != "POST" or "rollout" not in request.match_info:
                return await handler(request)
            with self._recorder(request).request():
                return await handler(request)

        return counted

    # -- handlers

    async def _models(self, http: web.Request) -> web.Response:
        return _json(models_body(MODEL, max_model_len=self._lengths[http.match_info["rollout"]]))

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        recorder, body = self._recorder(http), await _body(http)
        request: ChatCompletionRequest = read_request(body, ChatCompletionRequest)
        model = request.model or MODEL
        if not request.stream:
            return _json((await self._answer(http, recorder, body, lambda: recorder.chat(request))).body(model))
        asked = asyncio.ensure_future(self._answer(http, recorder, body, lambda: recorder.chat(request)))
        try:
            options = request.stream_options
            return await _stream(http, asked, model, include_usage=bool(options and options.include_usage))
        finally:
            asked.cancel()

    async def _in_dialect(self, http: web.Request) -> web.StreamResponse:
        dialect = _DIALECTS[http.path.rpartition("/")[2]]
        recorder, body = self._recorder(http), await _body(http)
        # the whole history is read and written anew: as much work as rendering it
        await self._queue.wait(recorder)
        request = dialect.request(body)
        if not request.chat.stream:
            answer = await self._answer(http, recorder, body, lambda: recorder.chat(request.chat))
            return _json(dialect.body(answer, request.said))
        asked = asyncio.ensure_future(self._answer(http, recorder, body, lambda: recorder.chat(request.chat)))
        try:
            response = await _begin_stream(http, asked)
            try:
                for event in dialect.events(asked.result(), request.said):
                    data = msgspec.json.encode(event)
                    await response.write(f"event: {event['type']}\ndata: ".encode() + data + b"\n\n")
            except GatewayError as error:
                await response.write(b"event: error\ndata: " + msgspec.json.encode(dialect.error(error)) + b"\n\n")
            await response.write_eof()
            return response
        finally:
            asked.cancel()

    async def _generate(self, http: web.Request) -> web.Response:
        recorder, body = self._recorder(http), await _body(http)
        request: TokenRequest = read_request(body, TokenRequest)
        if request.stream:
            raise bad_request("stream must be false here", "stream")
        answer = await self._answer(http, recorder, body, lambda: recorder.generate(request))
        return _json(answer.body(request.model or MODEL))

    async def _answer(
        self,
        http: web.Request,
        recorder: RolloutRecorder,
        body: bytes,
        work: Callable[[], Any],
    ) -> Any:
        self._recorder(http)  # it may have ended while the body was on its way
        # a program that makes two requests with one digest deceives itself alone: calls are those of its rollout
        key = xxhash.xxh3_128_digest(body) + http.path.encode()
        repeats = http.headers.get("x-stainless-retry-count", "0").strip() not in ("", "0")
        return await recorder.calls.answer(key, work, repeats=repeats)

    def _recorder(self, http: web.Request) -> RolloutRecorder:
        recorder = self._recorders.get(http.match_info["rollout"])
        if recorder is None:  # it has ended since its secret was compared
            raise GatewayError(404, "no running rollout has this path and key", code="not_found")
        return recorder

    def _note(self, name: str, value: Any) -> None:
        """Say once what a program asks for and does not get."""
        shown = (name, repr(value)[:100])
        if shown not in self._noted and len(self._noted) < _MAX_NOTED:
            self._noted.add(shown)
            _log.warning("a program requested %s %s, which is ignored: the recipe decides on sampling", *shown)


@web.middleware
async def _key_as_bearer(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Take the key of a program that sends it as ``x-api-key``."""
    key = request.headers.get("x-api-key")
    if key is not None and not request.headers.get("Authorization"):
        request = request.clone(headers={**request.headers, "Authorization": f"Bearer {key}"})
    return await handler(request)


async def _body(http: web.Request) -> bytes:
    """Return the body of a request (GatewayError, 408, where it does not arrive in time)."""
    if http.content.is_eof():  # most have arrived with their headers, and need no timer
        return await http.read()
    try:
        async with asyncio.timeout(_BODY_S):
            return await http.read()
    except TimeoutError:
        raise GatewayError(408, f"the body has not arrived in {_BODY_S:g} s", code="request_timeout") from None


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn exceptions of handlers into answers."""
    try:
        return await handler(request)
    except GatewayError as error:
        return _refused(error, _DIALECTS.get(request.path.rpartition("/")[2]))
    except web.HTTPRequestEntityTooLarge:
        return _refused(GatewayError(413, f"a request may have {_MAX_BODY} bytes", code="request_too_large"))
    except web.HTTPException as error:
        return _refused(GatewayError(error.status, error.reason, code="not_found" if error.status == 404 else None))
    except ConnectionResetError:
        return web.Response(status=499)  # the client has gone: it does not get this
    except Exception:  # noqa: BLE001 - the one place where every failure becomes an answer
        _log.exception("a request failed")
        return _refused(GatewayError(500, "the gateway failed", code="internal_error"))


def _refused(error: GatewayError, dialect: Dialect | None = None) -> web.Response:
    # read by OpenAI's SDKs: a status alone would let them repeat what cannot succeed
    headers = {"x-should-retry": "true" if error.retry else "false"}
    data = msgspec.json.encode(error.body if dialect is None else dialect.error(error))
    return web.Response(status=error.status, body=data, content_type="application/json", headers=headers)


def _json(body: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


async def _stream(
    http: web.Request, asked: asyncio.Future[ChatAnswer], model: str, *, include_usage: bool
) -> web.StreamResponse:
    """Answer with server-sent events."""
    response = await _begin_stream(http, asked)
    try:
        for chunk in asked.result().chunks(model, include_usage=include_usage):
            await response.write(b"data: " + msgspec.json.encode(chunk) + b"\n\n")
    except GatewayError as error:
        await response.write(b"data: " + msgspec.json.encode(error.body) + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


async def _begin_stream(http: web.Request, asked: asyncio.Future[ChatAnswer]) -> web.StreamResponse:
    """Return a stream when the answer is there. An error that comes at once is an ordinary answer."""
    await asyncio.wait([asked], timeout=_QUIET_S)
    if asked.done():
        asked.result()
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(http)
    while not asked.done():
        await response.write(b": sampling\n\n")
        await asyncio.wait([asked], timeout=_QUIET_S)
    return response
