"""What an engine may answer through the router, and what a request may hold: nothing without a maximum."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from hpcrl.inference.dynamo import router
from hpcrl.inference.dynamo.router import Front, front_apps
from hpcrl.inference.dynamo.selection import CandidateEngine, EngineChoice
from hpcrl.network.auth import Gate

LIMIT = 1 << 16


class OneEngine:
    """A selection of one engine, which is always chosen."""

    def __init__(self, url: str) -> None:
        self.workers = {url: CandidateEngine(url, number=1)}

    @contextlib.asynccontextmanager
    async def chosen(self, token_ids: list[int], **_: Any) -> AsyncIterator[EngineChoice]:
        (worker,) = self.workers.values()
        yield EngineChoice(worker, "1", 0)


@pytest.fixture
async def client(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TestClient[Any, Any]]:
    """A client of the router; its engine answers as many bytes as the first token of the prompt says."""
    monkeypatch.setattr(router, "_MAX_ANSWER_BYTES", LIMIT)

    async def generate(request: web.Request) -> web.Response:
        return web.Response(body=bytes((await request.json())["token_ids"][0]), content_type="application/json")

    app = web.Application()
    app.add_routes([web.post("/inference/v1/generate", generate)])
    async with TestServer(app) as engine, aiohttp.ClientSession() as http:
        url = str(engine.make_url("")).rstrip("/")
        front = Front(OneEngine(url), http, timeout_s=20.0, health_s=20.0)  # type: ignore[arg-type]
        async with TestClient(TestServer(front_apps(front, Gate("router", None))[0])) as client:
            yield client


async def test_a_longer_answer_is_that_of_an_engine_that_failed(client: TestClient[Any, Any]) -> None:
    async def ask(size: int) -> tuple[int, int]:
        answer = await client.post("/inference/v1/generate", json={"token_ids": [size]})
        return answer.status, len(await answer.read())

    assert await ask(LIMIT) == (200, LIMIT)
    assert (await ask(LIMIT + 1))[0] == 502
    assert await ask(3) == (200, 3)


@pytest.mark.parametrize("token", ["-1", "4294967296", "9" * 40, "1.5", "true", '"3"', "null"])
async def test_a_token_that_is_none_is_refused(token: str, client: TestClient[Any, Any]) -> None:
    answer = await client.post("/inference/v1/generate", data=f'{{"token_ids": [{token}]}}')
    assert answer.status == 400
