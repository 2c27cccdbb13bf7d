"""The layer of a prefill engine's HTTP that keeps rows of experts for the orchestrator."""

from __future__ import annotations

import asyncio
import base64
import json
from types import SimpleNamespace
from typing import Any

import pytest

from hpcrl.inference.vllm import prompt_rows
from hpcrl.inference.vllm.prompt_rows import PromptRows

ROWS = bytes(range(256)) * 17
GENERATE = "/inference/v1/generate"


def answer_with(rows: str | None, **more: Any) -> bytes:
    value = {"request_id": "r", "choices": [{"index": 0, "token_ids": [5], "routed_experts": rows, **more}]}
    return json.dumps(value, separators=(",", ":")).encode()


class Server:
    """What is below the layer: answers with ``body``, in two pieces."""

    def __init__(self, body: bytes, *, kind: str = "application/json", status: int = 200) -> None:
        self.body, self.kind, self.status = body, kind, status

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", self.kind.encode()), (b"content-length", str(len(self.body)).encode())]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        half = len(self.body) // 2
        await send({"type": "http.response.body", "body": self.body[:half], "more_body": True})
        await send({"type": "http.response.body", "body": self.body[half:]})


async def ask(layer: PromptRows, path: str, *, request_id: str = "", query: str = "") -> tuple[int, bytes]:
    """Status and body; the length that was said is that of the body."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"x-request-id", request_id.encode())] if request_id else []
    scope = {"type": "http", "path": path, "headers": headers, "query_string": query.encode()}
    await layer(scope, None, send)  # type: ignore[arg-type]
    body = b"".join(message["body"] for message in sent[1:])
    said = [int(value) for name, value in sent[0]["headers"] if name == b"content-length"]
    assert said in ([], [len(body)])
    return sent[0]["status"], body


async def fetched(layer: PromptRows, request_id: str) -> tuple[int, bytes]:
    return await ask(layer, "/hpcrl/prompt_rows", query=f"request={request_id}")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_rows, "_LATE_S", 0.2)
    monkeypatch.setattr(prompt_rows, "_PIECE", 1024)


def test_rows_stay_behind_and_are_given_once() -> None:
    async def scenario() -> None:
        text = base64.b64encode(ROWS).decode()
        layer = PromptRows(Server(answer_with(text, finish_reason="length")))
        status, body = await ask(layer, GENERATE, request_id="a")
        # the router gets the answer as it was, without them
        assert (status, body) == (200, answer_with(None, finish_reason="length"))
        assert await fetched(layer, "b") == (404, b"")
        assert await fetched(layer, "a") == (200, ROWS)
        assert await fetched(layer, "a") == (404, b"")

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "server",
    [
        Server(answer_with(None)),
        Server(answer_with("AAAA"), status=500),
        Server(b"data: " + answer_with("AAAA") + b"\n\n", kind="text/event-stream"),
    ],
)
def test_other_answers_pass_as_they_are(server: Server) -> None:
    async def scenario() -> None:
        layer = PromptRows(server)
        assert await ask(layer, GENERATE, request_id="a") == (server.status, server.body)
        assert (await fetched(layer, "a"))[0] == 404

    asyncio.run(scenario())


def test_requests_without_a_name_keep_their_rows() -> None:
    """The orchestrator's own, and those of people."""
    body = answer_with("AAAA")
    assert asyncio.run(ask(PromptRows(Server(body)), GENERATE)) == (200, body)


def test_rows_that_come_late_are_waited_for() -> None:
    async def scenario() -> None:
        layer = PromptRows(Server(answer_with(base64.b64encode(ROWS).decode())))
        waiting = asyncio.create_task(fetched(layer, "a"))
        await asyncio.sleep(0.02)
        await ask(layer, GENERATE, request_id="a")
        assert await waiting == (200, ROWS)

    asyncio.run(scenario())


def test_what_nobody_asks_for_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    # the module's own clock: the event loop goes by the real one
    monkeypatch.setattr(prompt_rows, "time", SimpleNamespace(monotonic=lambda: now))

    async def scenario() -> None:
        nonlocal now
        text = base64.b64encode(ROWS).decode()
        layer = PromptRows(Server(answer_with(text)), limit_bytes=2 * len(text), keep_s=60.0)
        for name in "abc":
            await ask(layer, GENERATE, request_id=name)
        assert [(await fetched(layer, name))[0] for name in "ab"] == [404, 200]
        now = 61.0
        await ask(layer, GENERATE, request_id="d")
        assert [(await fetched(layer, name))[0] for name in "cd"] == [404, 200]

    asyncio.run(scenario())
