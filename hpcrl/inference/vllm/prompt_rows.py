"""Rows of experts of prompts that a prefill engine computed, kept until the orchestrator asks for them.

The router sends each prompt to a prefill engine first, and nobody gets that answer: its rows would be lost, though
the decode engine, which fetches the KV, has none of them. This layer of the server's HTTP takes the rows out of such
an answer, so that the router does not read them either, and gives them to whoever names the request. The router gives
both sides of a request one id, which the answer of the decode engine has as well, and which says who computed its
prompt.

Rows are kept as they are in the answer, and leave as bytes of an ``.npy`` file. No torch is imported.
"""

from __future__ import annotations

import asyncio
import binascii
import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs

from hpcrl.inference.vllm.access import App, Message, Receive, RunAccessBehindRouter, Send

__all__ = ["PromptRows", "RunAccessToPrefill"]

_PATH = "/hpcrl/prompt_rows"
_GENERATE = "/inference/v1/generate"
_BEFORE = b'"routed_experts":"'
_PIECE = 1 << 20
"""Of base64, a multiple of four."""
_LIMIT_BYTES = 1 << 30
_KEEP_S = 3600.0
_LATE_S = 2.0


class PromptRows:
    """The layer. Least recently computed rows go first."""

    def __init__(self, app: App, *, limit_bytes: int = _LIMIT_BYTES, keep_s: float = _KEEP_S) -> None:
        """Begin, empty.

        Parameters
        ----------
        app:
            vLLM's own server.
        limit_bytes:
            Of all rows together, as base64.
        keep_s:
            Rows that nobody has asked for within this time are of a request that was given up.
        """
        self._app, self._limit, self._keep_s = app, limit_bytes, keep_s
        self._rows: OrderedDict[str, tuple[float, bytes]] = OrderedDict()
        self._bytes = 0
        self._news: dict[str, asyncio.Event] = {}

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one connection of ASGI."""
        path = scope.get("path")
        if scope["type"] == "http" and path == _PATH:
            (request_id,) = parse_qs(scope["query_string"].decode()).get("request", [""])
            return await self._give(request_id, send)
        request_id = _header(scope, b"x-request-id")
        if scope["type"] != "http" or path != _GENERATE or not request_id:
            return await self._app(scope, receive, send)
        return await self._app(scope, receive, self._without_rows(request_id, send))

    def _without_rows(self, request_id: str, send: Send) -> Send:
        """Sends an answer without its rows, and keeps those."""
        start: Message = {}
        body = bytearray()

        async def part(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start" and _is_json(message):
                start = message
            elif not start or message["type"] != "http.response.body":
                await send(message)
            else:
                body.extend(message.get("body", b""))
                if not message.get("more_body"):
                    rows = _cut(body)
                    if rows is not None:
                        self._keep(request_id, rows)
                    headers = [(name, value) for name, value in start["headers"] if name.lower() != b"content-length"]
                    length = (b"content-length", str(len(body)).encode())
                    await send({**start, "headers": [*headers, length]})
                    await send({"type": "http.response.body", "body": bytes(body)})

        return part

    def _keep(self, request_id: str, rows: bytes) -> None:
        self._drop(request_id)
        self._rows[request_id] = (time.monotonic(), rows)
        self._bytes += len(rows)
        while self._rows:
            oldest, (kept_s, _) = next(iter(self._rows.items()))
            if self._bytes <= self._limit and time.monotonic() - kept_s < self._keep_s:
                break
            self._drop(oldest)
        if request_id in self._news:
            self._news[request_id].set()

    def _drop(self, request_id: str) -> bytes | None:
        _, rows = self._rows.pop(request_id, (0.0, None))
        self._bytes -= len(rows or b"")
        return rows

    async def _give(self, request_id: str, send: Send) -> None:
        """Rows of one request, once; 404 where there are none."""
        if request_id not in self._rows:
            # the router may not have waited for this answer: it comes soon, or not at all
            event = self._news.setdefault(request_id, asyncio.Event())
            try:
                async with asyncio.timeout(_LATE_S):
                    await event.wait()
            except TimeoutError:
                pass
            finally:
                self._news.pop(request_id, None)
        rows = self._drop(request_id)
        kind = [(b"content-type", b"application/octet-stream" if rows else b"text/plain")]
        await send({"type": "http.response.start", "status": 200 if rows else 404, "headers": kind})
        for piece in _decoded(rows or b""):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class RunAccessToPrefill(RunAccessBehindRouter):
    """The door of a prefill engine's server whose rows the orchestrator asks for."""

    def __init__(self, app: App) -> None:
        super().__init__(PromptRows(app))


def _header(scope: Message, wanted: bytes) -> str:
    found: Any = next((value for name, value in scope.get("headers", ()) if name == wanted), b"")
    return str(found.decode("latin-1"))


def _is_json(start: Message) -> bool:
    kinds = [value for name, value in start["headers"] if name.lower() == b"content-type"]
    return start["status"] == 200 and any(kind.startswith(b"application/json") for kind in kinds)


def _cut(body: bytearray) -> bytes | None:
    """Take the rows out of an answer, where there is null then; None where it has none."""
    begin = body.find(_BEFORE)
    if begin < 0:
        return None
    first = begin + len(_BEFORE)
    end = body.index(b'"', first)
    rows = bytes(body[first:end])
    body[first - 1 : end + 1] = b"null"
    return rows


def _decoded(rows: bytes) -> Iterator[bytes]:
    for start in range(0, len(rows), _PIECE):
        yield binascii.a2b_base64(rows[start : start + _PIECE])
