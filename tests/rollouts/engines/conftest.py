"""Fixtures for tests of engines."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from unusable_answers_testing import LIMITS

from hpcrl.rollouts.engines.client import EngineClient


@pytest.fixture
async def serve() -> AsyncIterator[Any]:
    """An engine that answers everything with the bytes that it is given, and a client of it."""
    said: dict[str, tuple[str, bytes]] = {}

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        kind, body = said["answer"]
        kind, _, encoding = kind.partition(";")
        headers = {"Content-Type": kind, **({"Content-Encoding": encoding} if encoding else {})}
        return web.Response(body=body, headers=headers)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server, aiohttp.ClientSession() as http:
        client = EngineClient(http, name="engine-0", url=str(server.make_url("")), limits=LIMITS)
        yield said, client
