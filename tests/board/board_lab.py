"""A board that is served in a test, and a client that has its cookie."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from http.client import HTTPConnection
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import aiohttp

from hpcrl.board.board_access import BoardAccess
from hpcrl.board.board_server import board_app
from hpcrl.board.board_state import Board
from hpcrl.network.http_server import listen, make_runner, stop_serving

TOKEN = "a-token-of-a-test"


class Served(NamedTuple):
    """A board that answers.

    Attributes
    ----------
    url:
        Without a path.
    link:
        What a person opens first.
    """

    board: Board
    url: str

    @property
    def link(self) -> str:
        return f"{self.url}/?token={TOKEN}"


@contextlib.asynccontextmanager
async def served(*roots: Path) -> AsyncIterator[Served]:
    board = Board([str(root) for root in roots])
    access = BoardAccess(TOKEN)
    runner = make_runner(board_app(board, access), shutdown_timeout=2.0)
    await runner.setup()
    try:
        port = await listen(runner, access.pending, ("127.0.0.1", 0))
        yield Served(board, f"http://127.0.0.1:{port}")
    finally:
        await stop_serving(runner)


class Client:
    """A browser without a screen: it opened the link, and has the cookie."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url = session, url

    async def status_of(self, target: str) -> int:
        """Status of a request whose target is sent as it is; a client of others would shorten ``/run/..``."""
        cookie = "; ".join(f"{each.key}={each.value}" for each in self._session.cookie_jar)

        def ask() -> int:
            connection = HTTPConnection(urlsplit(self._url).netloc)
            try:
                connection.putrequest("GET", target)
                connection.putheader("Cookie", cookie)
                connection.endheaders()
                return connection.getresponse().status
            finally:
                connection.close()

        return await asyncio.to_thread(ask)

    async def get(self, path: str, **headers: str) -> tuple[int, str, Mapping[str, str]]:
        """Status, body and headers of the answer."""
        async with self._session.get(self._url + path, headers=headers, allow_redirects=False) as answer:
            return answer.status, await answer.text(), answer.headers


@contextlib.asynccontextmanager
async def client_of_board(*roots: Path) -> AsyncIterator[Client]:
    # a jar that keeps cookies of addresses
    async with (
        served(*roots) as board,
        aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session,
    ):
        async with session.get(board.link) as answer:
            assert answer.status == 200
        yield Client(session, board.url)
