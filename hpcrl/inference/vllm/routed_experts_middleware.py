"""Rows of experts stay at the engine that chose them, until the orchestrator fetches them as raw bytes.

vLLM writes rows as base64 into its JSON, which a router would read and hand on. This layer of the server's HTTP takes
them out of the answers, and out of the parts of those that come in parts, to requests that say that their sender knows
of it; what is left in the answer is where the rows are (`hpcrl.network.routed_experts_reference`). Other requests are
answered as vLLM answers.

Between prefill and decode the answer of the prefill engine is dropped: its rows would be lost, though the decode
engine, which fetches the KV, has none of the prompt. The router gives both engines of a request one id, which the
answer of the decode engine has as well, and which says who computed its prompt: rows are kept under that id.

No torch is imported.
"""

from __future__ import annotations

import asyncio
import binascii
import uuid
from typing import Any
from urllib.parse import parse_qs

import msgspec

from hpcrl.inference.kept_rows import KeptRows
from hpcrl.inference.vllm.access import App, Message, Receive, RunAccess, Send
from hpcrl.network.routed_experts_reference import FIELD, PATH, UNWANTED, decoded_base64, digest_of

_GENERATE = "/inference/v1/generate"
_FIELD, _UNWANTED = f'"{FIELD}"'.encode(), f'"{UNWANTED}"'.encode()
_LONGEST = max(len(_FIELD), len(_UNWANTED))
_BEFORE = b'"routed_experts":"'
_END_OF_EVENT = b"\n\n"
_PIECE = 1 << 20
"""Bytes of rows that are sent at a time."""
_LARGE_BYTES = 1 << 18
"""Bytes from which rows are decoded in a thread instead of the event loop."""


class RoutedExpertsMiddleware:
    """The layer.

    Parameters
    ----------
    app:
        vLLM's own server.
    """

    def __init__(self, app: App) -> None:
        self._app, self._rows = app, KeptRows()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one connection of ASGI."""
        path = scope.get("path") if scope["type"] == "http" else None
        if path == PATH:
            return await self._give(parse_qs(scope["query_string"].decode()), send)
        if path == _GENERATE:
            request = _Request(receive)
            return await self._app(scope, request, _Answer(self._rows, scope, request, send))
        return await self._app(scope, receive, send)

    async def _give(self, query: dict[str, list[str]], send: Send) -> None:
        """Send the rows of one name, once; 404 if there are none."""
        rows = await self._rows.take(query.get("name", [""])[0], late="late" in query)
        kind = b"text/plain" if rows is None else b"application/octet-stream"
        headers = [(b"content-type", kind), (b"content-length", str(len(rows or b"")).encode())]
        await send({"type": "http.response.start", "status": 404 if rows is None else 200, "headers": headers})
        view = memoryview(rows or b"")
        for start in range(0, len(view), _PIECE):
            await send({"type": "http.response.body", "body": bytes(view[start : start + _PIECE]), "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class _Request:
    """Hands a request on, and sees whether its sender fetches rows, or wants none."""

    def __init__(self, receive: Receive) -> None:
        self._receive, self._tail = receive, b""
        self.fetches = self.wants_none = False

    async def __call__(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            seen = self._tail + message.get("body", b"")
            self.fetches = self.fetches or _FIELD in seen
            self.wants_none = self.wants_none or _UNWANTED in seen
            self._tail = seen[1 - _LONGEST :]
        return message


class _Answer:
    """Sends one answer, without its rows where these are fetched."""

    def __init__(self, rows: KeptRows, scope: Message, request: _Request, send: Send) -> None:
        self._rows, self._request, self._send = rows, request, send
        # the router reaches the engine by the address that the orchestrator knows it by
        self._engine = _header(scope["headers"], b"host")
        self._name = _header(scope["headers"], b"x-request-id") or uuid.uuid4().hex
        self._parts = 0
        self._start: Message = {}
        self._body = bytearray()
        self._pass = self._whole = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            await self._begin(message)
        elif self._pass or message["type"] != "http.response.body":
            await self._send(message)
        elif self._whole:
            await self._add(message)
        else:
            await self._events(message)

    async def _begin(self, start: Message) -> None:
        kind = _header(start["headers"], b"content-type")
        self._whole = kind.startswith("application/json")
        streams = kind.startswith("text/event-stream")
        self._pass = not self._request.fetches or start["status"] != 200 or not (self._whole or streams)
        if self._whole and not self._pass:
            self._start = start  # its length will be another one
        else:
            await self._send(start)

    async def _add(self, message: Message) -> None:
        """Collect an answer that is not streamed; send it once it is complete."""
        self._body += message.get("body", b"")
        if message.get("more_body"):
            return
        body = await self._aside(self._body)
        headers = [(name, value) for name, value in self._start["headers"] if name.lower() != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        await self._send({**self._start, "headers": headers})
        await self._send({"type": "http.response.body", "body": bytes(body)})

    async def _events(self, message: Message) -> None:
        """Send the events of a streamed answer as they arrive, each whole."""
        more = message.get("more_body", False)
        looked = max(0, len(self._body) - 1)
        self._body += message.get("body", b"")
        out = bytearray()
        while (end := self._body.find(_END_OF_EVENT, looked)) >= 0:
            end += len(_END_OF_EVENT)
            out += await self._aside(self._body[:end])
            del self._body[:end]
            looked = 0
        if not more:
            out += self._body
        if out or not more:
            await self._send({"type": "http.response.body", "body": bytes(out), "more_body": more})

    async def _aside(self, text: bytearray) -> bytearray:
        """Keep the rows of an answer or an event, and replace them by their reference; without rows it is unchanged."""
        begin = text.find(_BEFORE)
        if begin < 0:
            return text
        first = begin + len(_BEFORE)
        end = text.find(b'"', first)
        if end < 0:
            return text
        if self._request.wants_none:
            text[first - 1 : end + 1] = b"null"
            return text
        base64 = bytes(memoryview(text)[first:end])
        try:
            if len(base64) < _LARGE_BYTES:
                rows, digest = _decoded(base64)
            else:
                rows, digest = await asyncio.to_thread(_decoded, base64)
        except binascii.Error:
            return text
        reference = self._rows.keep(f"{self._name}/{self._parts}", rows, engine=self._engine, digest=digest)
        self._parts += 1
        text[first - 1 : end + 1] = msgspec.json.encode(reference)
        return text


class RunAccessWithRows(RunAccess):
    """The door of an engine's server that is asked for experts."""

    def __init__(self, app: App) -> None:
        super().__init__(RoutedExpertsMiddleware(app))


class RunAccessBehindRouterWithRows(RunAccess):
    """The same behind vllm-router, see `hpcrl.inference.vllm.access.RunAccessBehindRouter`."""

    def __init__(self, app: App) -> None:
        super().__init__(RoutedExpertsMiddleware(app), open_health=True)


def _header(headers: list[tuple[bytes, bytes]], wanted: bytes) -> str:
    found: Any = next((value for name, value in headers if name.lower() == wanted), b"")
    return str(found.decode("latin-1"))


def _decoded(base64: bytes) -> tuple[bytes, str]:
    """Return rows and their digest."""
    data = bytes(decoded_base64(base64))
    return data, digest_of(data)
