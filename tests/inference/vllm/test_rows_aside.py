"""Rows of experts that engines keep for the orchestrator: the store, and the layer of vLLM's HTTP before it."""

from __future__ import annotations

import asyncio
import base64
import json
from types import SimpleNamespace
from typing import Any

import pytest

from hpcrl.inference import kept_rows
from hpcrl.inference.kept_rows import KeptRows
from hpcrl.inference.vllm import routed_experts_middleware
from hpcrl.inference.vllm.routed_experts_middleware import RoutedExpertsMiddleware
from hpcrl.network.routed_experts_reference import FIELD, PATH, UNWANTED, RowsReference, digest_of

ROWS = bytes(range(256)) * 17
TEXT = base64.b64encode(ROWS).decode()
GENERATE = "/inference/v1/generate"
FETCHES = json.dumps({"token_ids": [1], FIELD: True}).encode()


def answer_with(rows: Any, **more: Any) -> bytes:
    value = {"request_id": "r", "choices": [{"index": 0, "token_ids": [5], "routed_experts": rows, **more}]}
    return json.dumps(value, separators=(",", ":")).encode()


def kept(name: str, rows: bytes = ROWS, engine: str = "node-3:8000") -> dict[str, Any]:
    """What an answer has in the place of rows."""
    return {"engine": engine, "name": name, "num_bytes": len(rows), "digest": digest_of(rows)}


class Server:
    """What is below the layer: reads its request and answers with ``body``, in pieces of so many bytes."""

    def __init__(self, body: bytes, *, kind: str = "application/json", status: int = 200, piece: int = 1000) -> None:
        self.body, self.kind, self.status, self.piece = body, kind, status, piece

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass
        headers = [(b"content-type", self.kind.encode())]
        if self.kind == "application/json":
            headers.append((b"content-length", str(len(self.body)).encode()))
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        for start in range(0, len(self.body), self.piece):
            part = self.body[start : start + self.piece]
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def ask(
    layer: RoutedExpertsMiddleware,
    path: str = GENERATE,
    *,
    request_id: str = "",
    query: str = "",
    request: bytes = FETCHES,
    piece: int = 7,
) -> tuple[int, bytes]:
    """Status and body; the length that was said is that of the body. The request comes in small pieces."""
    sent: list[Any] = []
    pieces = [request[start : start + piece] for start in range(0, len(request), piece)]

    async def receive() -> Any:
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", b"node-3:8000")]
    if request_id:
        headers.append((b"x-request-id", request_id.encode()))
    scope = {"type": "http", "path": path, "headers": headers, "query_string": query.encode()}
    await layer(scope, receive, send)
    body = b"".join(message["body"] for message in sent[1:])
    said = [int(value) for name, value in sent[0]["headers"] if name == b"content-length"]
    assert said in ([], [len(body)])
    assert not sent[-1].get("more_body")
    return sent[0]["status"], body


async def fetched(layer: RoutedExpertsMiddleware, name: str, *, late: bool = False) -> tuple[int, bytes]:
    return await ask(layer, PATH, query=f"name={name}{'&late=1' if late else ''}")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_rows, "_LATE_S", 0.2)
    monkeypatch.setattr(routed_experts_middleware, "_PIECE", 1024)


@pytest.mark.parametrize("large", [False, True])
async def test_rows_stay_behind_and_are_given_once(monkeypatch: pytest.MonkeyPatch, large: bool) -> None:
    if large:
        monkeypatch.setattr(routed_experts_middleware, "_LARGE_BYTES", 100)
    layer = RoutedExpertsMiddleware(Server(answer_with(TEXT, finish_reason="length")))
    # the answer is as it was, and says where they are
    assert await ask(layer, request_id="a") == (200, answer_with(kept("a/0"), finish_reason="length"))
    assert await fetched(layer, "b/0") == (404, b"")
    assert await fetched(layer, "a/0") == (200, ROWS)
    assert await fetched(layer, "a/0") == (404, b"")


@pytest.mark.parametrize("piece", [1, 7, 1000])
async def test_unwanted_rows_are_not_kept(piece: int) -> None:
    """Whole or in parts, and however the request is cut on its way."""
    request = json.dumps({"token_ids": [1], FIELD: True, UNWANTED: True}).encode()
    whole = RoutedExpertsMiddleware(Server(answer_with(TEXT, finish_reason="length")))
    assert await ask(whole, request_id="a", request=request, piece=piece) == (
        200,
        answer_with(None, finish_reason="length"),
    )
    events = [b"data: " + answer_with(rows) + b"\n\n" for rows in (TEXT, None)]
    parts = RoutedExpertsMiddleware(Server(events[0] * 2, kind="text/event-stream"))
    assert await ask(parts, request_id="a", request=request, piece=piece) == (200, events[1] * 2)
    for layer in (whole, parts):
        assert [await fetched(layer, f"a/{number}") for number in range(2)] == [(404, b"")] * 2


async def test_requests_without_a_name_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = RoutedExpertsMiddleware(Server(answer_with(TEXT)))
    names = [json.loads((await ask(layer))[1])["choices"][0]["routed_experts"]["name"] for _ in range(2)]
    assert len(set(names)) == 2
    assert [await fetched(layer, name) for name in names] == [(200, ROWS)] * 2


@pytest.mark.parametrize("piece", [1, 2, 1000, 1 << 20])
async def test_each_part_of_a_stream_has_its_own(piece: int) -> None:
    """However the events are cut on their way to the layer; what is not an event with rows passes as it is."""
    parts = [ROWS[:100], ROWS[100:1000], ROWS[1000:]]
    texts = [base64.b64encode(part).decode() for part in parts]

    def events(*rows: Any) -> bytes:
        return b"".join(b"data: " + data + b"\n\n" for data in (*map(answer_with, rows), b"[DONE]"))

    stream = events(texts[0], None, *texts[1:])
    layer = RoutedExpertsMiddleware(Server(stream, kind="text/event-stream; charset=utf-8", piece=piece))
    said = [kept(f"a/{number}", part) for number, part in enumerate(parts)]
    assert await ask(layer, request_id="a") == (200, events(said[0], None, *said[1:]))
    assert [await fetched(layer, f"a/{number}") for number in range(3)] == [(200, part) for part in parts]


async def test_events_are_sent_when_they_are_whole() -> None:
    """Not with the end of the answer."""
    event = b"data: " + answer_with(None) + b"\n\n"
    sent: list[Any] = []

    async def server(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": event + event[:10], "more_body": True})
        assert sent[1:] == [{"type": "http.response.body", "body": event, "more_body": True}]
        await send({"type": "http.response.body", "body": event[10:], "more_body": False})

    async def receive() -> Any:
        return {"type": "http.request", "body": FETCHES}

    async def send(message: Any) -> None:
        sent.append(message)

    await RoutedExpertsMiddleware(server)({"type": "http", "path": GENERATE, "headers": []}, receive, send)
    assert sent[2:] == [{"type": "http.response.body", "body": event, "more_body": False}]


@pytest.mark.parametrize(
    ("server", "request_"),
    [
        pytest.param(Server(answer_with(None)), FETCHES, id="none"),
        pytest.param(Server(answer_with(TEXT), status=500), FETCHES, id="an error"),
        pytest.param(Server(answer_with(TEXT), kind="text/plain"), FETCHES, id="of another kind"),
        pytest.param(Server(answer_with("AA!A")), FETCHES, id="no base64"),
        pytest.param(Server(answer_with(TEXT)[:-300]), FETCHES, id="torn"),
        pytest.param(Server(answer_with(TEXT)), b'{"token_ids":[1]}', id="not to be fetched"),
    ],
)
async def test_other_answers_pass_as_they_are(server: Server, request_: bytes) -> None:
    layer = RoutedExpertsMiddleware(server)
    assert await ask(layer, request_id="a", request=request_) == (server.status, server.body)
    assert (await fetched(layer, "a/0"))[0] == 404


async def test_rows_that_come_late_are_waited_for() -> None:
    layer = RoutedExpertsMiddleware(Server(answer_with(TEXT)))
    waiting = asyncio.create_task(fetched(layer, "a/0", late=True))
    await asyncio.sleep(0.02)
    await ask(layer, request_id="a")
    assert await waiting == (200, ROWS)
    assert await fetched(layer, "a/0", late=True) == (404, b"")


async def test_unrequested_entries_are_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    # the module's own clock: the event loop goes by the real one
    monkeypatch.setattr(kept_rows, "time", SimpleNamespace(monotonic=lambda: now))
    rows = KeptRows(limit_bytes=2 * len(ROWS), keep_s=60.0)
    for name in "abc":
        assert rows.keep(name, ROWS, engine="e") == RowsReference("e", name, len(ROWS), digest_of(ROWS))
    assert rows.bytes == 2 * len(ROWS)
    assert [await rows.take(name) for name in "ab"] == [None, ROWS]
    now = 30.0
    rows.keep("d", ROWS, engine="e")
    now = 61.0
    # too late, though nothing came since
    assert [await rows.take(name) for name in "cd"] == [None, ROWS]
    assert rows.bytes == 0
    rows.keep("e", ROWS, engine="e")
    rows.keep("e", ROWS[1:], engine="e")
    assert rows.bytes == len(ROWS) - 1
    assert await rows.take("e") == ROWS[1:]
