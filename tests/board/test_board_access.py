"""Who may read a board, and what an answer permits a page."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest
from board_lab import TOKEN, client_of_board, served
from runs_testing import make_run

from hpcrl.board.board_access import BoardAccess
from hpcrl.board.board_server import serve_board
from hpcrl.errors import UsageError

PATHS = ["/", "/run/mine", "/run/mine/logs", "/compare", "/assets/page.css", "/nowhere"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_run(tmp_path, "mine")
    return tmp_path


async def test_nothing_is_answered_without_the_token(root: Path) -> None:
    async with served(root) as board, aiohttp.ClientSession() as session:
        for path in PATHS:
            for query in ("", "?token=wrong", f"?token={TOKEN}x", "?token="):
                async with session.get(board.url + path + query) as answer:
                    assert answer.status == 403, path
                    assert "mine" not in await answer.text()
                    assert "Set-Cookie" not in answer.headers


async def test_the_link_gives_a_cookie_and_leads_to_the_address_without_the_token(root: Path) -> None:
    async with served(root) as board, aiohttp.ClientSession() as session:
        async with session.get(f"{board.url}/run/mine/logs?role=engine&token={TOKEN}") as answer:
            text, cookie = await answer.text(), answer.headers["Set-Cookie"]
        assert answer.status == 200
        assert 'content="0; url=/run/mine/logs?role=engine"' in text
        assert TOKEN not in text
        for part in ("HttpOnly", "SameSite=Strict", "Path=/"):
            assert part in cookie
        # no other server, whatever the path
        async with session.get(f"{board.url}//evil.example/x?token={TOKEN}") as answer:
            assert 'url=/evil.example/x"' in await answer.text()
        async with session.get(f'{board.url}/"><script>?token={TOKEN}') as answer:
            assert "<script>" not in await answer.text()


async def test_another_name_of_this_machine_is_refused(root: Path) -> None:
    async with client_of_board(root) as client:
        for name in (
            "evil.example",
            "evil.example:80",
            "127.0.0.1.evil.example",
            "",
            "localhost@evil.example",
            "[::2]",
        ):
            status, text, _ = await client.get("/", Host=name)
            assert status in (400, 403), name
            assert "mine" not in text
        for name in ("localhost", "127.0.0.1:9999", "LOCALHOST:1", "[::1]:80"):  # a forwarded port has another number
            status, _, _ = await client.get("/", Host=name)
            assert status == 200, name


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
async def test_only_reading_is_answered(root: Path, method: str) -> None:
    async with served(root) as board, aiohttp.ClientSession() as session:
        async with session.request(method, f"{board.url}/run/mine?token={TOKEN}") as answer:
            assert answer.status == 405
        async with session.head(board.link) as answer:
            assert answer.status == 200


async def test_pages_may_load_nothing_from_elsewhere_and_cannot_be_framed(root: Path) -> None:
    async with client_of_board(root) as client:
        for path in ("/", "/run/mine", "/run/nothing", "/nowhere"):
            _, _, headers = await client.get(path)
            policy = headers["Content-Security-Policy"]
            assert "default-src 'none'; script-src 'self';" in policy
            assert "frame-ancestors 'none'" in policy
            assert "unsafe-inline" not in policy.replace("style-src 'self' 'unsafe-inline'", "")
            assert headers["Cache-Control"] == "no-store"
            assert headers["Referrer-Policy"] == "no-referrer"
            assert headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(
    "key", ["..", "%2e%2e", "..%2f..%2fetc", "%2fetc%2fpasswd", "mine%2f..%2fmine", "mine%00", ".hidden", "x" * 300]
)
async def test_no_request_names_a_path(root: Path, key: str) -> None:
    (root / ".hidden").mkdir()
    async with client_of_board(root) as client:
        for path in (f"/run/{key}", f"/run/{key}/logs", f"/assets/{key}"):
            assert await client.status_of(path) in (400, 404), path
        assert await client.status_of("/run/mine") == 200
        assert await client.status_of(f"/run/mine/logs?role={key}") == 400
        assert await client.status_of(f"/run/mine/logs?attempt={key}") == 400


def test_tokens_are_compared_whole() -> None:
    access = BoardAccess(TOKEN)
    assert access.is_token(TOKEN)
    for wrong in ("", TOKEN[:-1], TOKEN.upper(), "\udcff", TOKEN + "\0"):
        assert not access.is_token(wrong)


async def test_an_address_that_others_reach_is_refused(root: Path) -> None:
    with pytest.raises(UsageError, match="--allow-remote"):
        await serve_board([str(root)], host="0.0.0.0", port=0, remote=False, announce=lambda path, port: None)


async def test_a_port_in_use_is_refused_in_words(root: Path) -> None:
    async with served(root) as board:
        port = urlsplit(board.url).port
        assert port is not None
        with pytest.raises(UsageError, match=f"port {port}: .*in use"):
            await serve_board([str(root)], host="127.0.0.1", port=port, remote=False, announce=lambda path, port: None)
