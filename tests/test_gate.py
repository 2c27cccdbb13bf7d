"""What a door answers with, whom it opens to without a token, and what counts as a file with a token."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from hpcrl.credentials import Credentials, ensure_token, read_token
from hpcrl.errors import RunDirError
from hpcrl.gate import Gate, RefusedRequest

TOKEN = "0123456789abcdef" * 4


async def answers(
    gate: Gate, socket: Path, *requests: tuple[str, str, Mapping[str, str]]
) -> list[tuple[int, str | None, str | None]]:
    """Status, ``Connection`` and ``WWW-Authenticate`` of each request to a server that listens on a socket file."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response()

    app = web.Application(middlewares=[gate.middleware()])
    app.router.add_route("*", "/{path}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, str(socket)).start()
    found = []
    try:
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(socket))) as session:
            for method, path, headers in requests:
                async with session.request(method, f"http://here{path}", headers=headers) as response:
                    said = response.headers
                    found.append((response.status, said.get("Connection"), said.get("WWW-Authenticate")))
    finally:
        await runner.cleanup()
    return found


async def test_a_door_says_how_to_come_in_and_closes_behind_strangers(tmp_path: Path) -> None:
    told: list[RefusedRequest] = []
    gate = Gate("server", Credentials(TOKEN, 2), report=told.append, open_health=True)
    ours, older = ({"Authorization": f"Bearer {TOKEN}.{attempt}"} for attempt in (2, 1))
    found = await answers(
        gate,
        tmp_path / "socket",
        ("GET", "/health", {}),
        ("POST", "/health", {}),
        ("GET", "/other", older),
        ("GET", "/other", ours),
    )
    assert found == [(200, "close", None), (401, "close", "Bearer"), (403, "close", None), (200, None, None)]
    # a socket file knows no address of who asks
    assert [(refused.peer, refused.reason) for refused in told] == [("", "no_token"), ("", "other_attempt")]


async def test_a_stranger_who_is_gone_already_has_no_address() -> None:
    told: list[RefusedRequest] = []
    guard = Gate("server", Credentials(TOKEN, 2), report=told.append).middleware()

    async def never(_: web.Request) -> web.StreamResponse:
        raise AssertionError("nothing is answered without the token")

    request = make_mocked_request("GET", "/other")
    assert request.remote is None
    assert (await guard(request, never)).status == 401
    assert [refused.peer for refused in told] == [""]


def test_who_asks_other_servers_of_a_run_brings_its_token_along() -> None:
    assert Gate("server", Credentials(TOKEN, 7)).headers == {"Authorization": f"Bearer {TOKEN}.7"}
    assert Gate("server", None).headers == {}


def test_a_role_has_the_token_of_the_run_that_started_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ensure_token(tmp_path)
    monkeypatch.setenv("HPCRL_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("HPCRL_ATTEMPT", "3")
    assert Credentials.from_env() == Credentials(read_token(tmp_path / "token"), 3)
    monkeypatch.delenv("HPCRL_RUN_DIR")
    assert Credentials.from_env() is None


def test_what_is_no_file_with_a_token_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_bytes(b"\xff" * 64)
    path.chmod(0o600)
    with pytest.raises(RunDirError, match="holds no token"):
        read_token(path)
    path.unlink()
    os.mkfifo(path, 0o600)  # nobody writes to it
    with pytest.raises(RunDirError, match="is not a file that its owner alone can read"):
        read_token(path)
