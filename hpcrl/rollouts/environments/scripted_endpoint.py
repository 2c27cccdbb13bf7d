"""An endpoint of a policy that says given texts, so that a program can be tried before there is a model."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from hpcrl.network.connection_limits import PendingConnections
from hpcrl.network.http_server import listen, make_runner, stop_serving
from hpcrl.rollouts.environments.base import Message, PolicyEndpoint, Reply
from hpcrl.storage.msgspec_types import decode_json

_MAX_BODY = 64 << 20
"""Maximum size of a request in bytes."""


class _Asked(msgspec.Struct, frozen=True):
    """Fields of a request that are read."""

    messages: list[dict[str, Any]]
    stream: bool | None = None


@contextlib.asynccontextmanager
async def scripted_endpoint(say: Callable[[list[Message]], Awaitable[Reply]]) -> AsyncIterator[PolicyEndpoint]:
    """Serve ``POST /v1/chat/completions`` on this machine, inside the context.

    Parameters
    ----------
    say:
        Gives the turn behind a whole conversation.
    """
    pending, key = PendingConnections(), secrets.token_urlsafe(16)

    async def chat(http: web.Request) -> web.StreamResponse:
        given = http.headers.get("Authorization", "") or f"Bearer {http.headers.get('x-api-key', '')}"
        if not hmac.compare_digest(given.encode("utf-8", "replace"), f"Bearer {key}".encode()):
            return web.Response(status=401)
        pending.admitted(http.transport)
        try:
            asked: _Asked = decode_json(await http.read(), _Asked)
        except msgspec.DecodeError as error:
            return web.json_response({"error": {"message": str(error), "type": "invalid_request_error"}}, status=400)
        reply = await say(list(asked.messages))
        return await _answer(http, reply, stream=bool(asked.stream))

    app = web.Application(client_max_size=_MAX_BODY)
    app.add_routes([web.post("/v1/chat/completions", chat)])
    runner = make_runner(app, handler_cancellation=True, shutdown_timeout=0.2)
    await runner.setup()
    try:
        port = await listen(runner, pending, ("127.0.0.1", 0))
        yield PolicyEndpoint(url=f"http://127.0.0.1:{port}/v1", key=key)
    finally:
        await stop_serving(runner)


async def _answer(http: web.Request, reply: Reply, *, stream: bool) -> web.StreamResponse:
    """Answer as OpenAI's API does."""
    reason, message = "stop" if reply.finished else "length", {"role": "assistant", "content": reply.text}
    head = {"id": "chatcmpl-scripted", "created": int(time.time()), "model": "policy"}
    if not stream:
        choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        return web.json_response({**head, "object": "chat.completion", "choices": [choice], "usage": usage})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(http)
    for delta, end in ((message, None), ({}, reason)):
        choices = [{"index": 0, "delta": delta, "finish_reason": end}]
        event = msgspec.json.encode({**head, "object": "chat.completion.chunk", "choices": choices})
        await response.write(b"data: " + event + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response
