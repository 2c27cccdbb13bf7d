"""Before the gate: what somebody without a token can do to a server is bounded, and its owner is answered."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import re
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from free_ports import free_port
from patience import patience
from vllm_environment import VLLM_PYTHON

from hpcrl.dock.warehouse.server import WarehouseServer
from hpcrl.network.auth import Gate
from hpcrl.network.connection_limits import PendingConnections
from hpcrl.network.credentials import Credentials
from hpcrl.network.http_server import listen, make_runner, stop_serving

ROOT = Path(__file__).resolve().parent.parent
TOKEN = "5" * 64


@contextlib.asynccontextmanager
async def server(pending: PendingConnections, *, open_health: bool = False) -> AsyncIterator[tuple[Gate, int]]:
    """A server of ours with one page, behind the gate."""

    async def page(request: web.Request) -> web.Response:
        await asyncio.sleep(float(request.query.get("s", "0")))
        return web.Response(text="ok")

    gate = Gate("test", Credentials(TOKEN, 1), open_health=open_health)
    gate.pending = pending
    app = web.Application(middlewares=[gate.middleware()])
    app.add_routes([web.get("/page", page), web.get("/health", page)])
    runner = make_runner(app)
    await runner.setup()
    try:
        yield gate, await listen(runner, pending, ("127.0.0.1", 0))
    finally:
        await stop_serving(runner)


async def send(port: int, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    return reader, writer


async def ended(reader: asyncio.StreamReader) -> bytes:
    """What arrives until the server ends the connection."""
    async with asyncio.timeout(20 * patience()):
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""


async def test_half_requests_do_not_keep_the_owner_waiting() -> None:
    pending = PendingConnections(limit=20, deadline_s=3600.0)
    async with server(pending) as (gate, port), aiohttp.ClientSession(headers=gate.headers) as owner:
        strangers = [await send(port, b"GET /page HT") for _ in range(200)]
        async with owner.get(f"http://127.0.0.1:{port}/page", timeout=aiohttp.ClientTimeout(20 * patience())) as answer:
            assert answer.status == 200
        assert len(pending) <= 20
        assert pending.aborted >= 180
        for _, writer in strangers:
            writer.close()


async def test_what_the_owner_has_in_flight_is_not_ended() -> None:
    pending = PendingConnections(limit=8, deadline_s=2.0)
    async with server(pending) as (gate, port), aiohttp.ClientSession(headers=gate.headers) as owner:

        async def ask() -> int:
            async with owner.get(f"http://127.0.0.1:{port}/page?s=3") as answer:
                return answer.status

        # more at once than the limit, each for longer than the deadline, and beside strangers
        asked = [asyncio.create_task(ask()) for _ in range(50)]
        strangers = [await send(port, b"") for _ in range(50)]
        assert await asyncio.gather(*asked) == [200] * 50
        for reader, writer in strangers:
            assert await ended(reader) == b""
            writer.close()


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"G",
        b"GET /page HTTP/1.1\r\nHost: x\r\nX-Slow: ",
        b"POST /page HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\nhalf",
        b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n",
    ],
)
async def test_a_stranger_has_a_deadline(head: bytes) -> None:
    # what is answered has time for that on a busy machine
    pending = PendingConnections(deadline_s=3.0 if b"/health" in head else 0.3)
    async with server(pending, open_health=True) as (_, port):
        reader, writer = await send(port, head)
        assert b"200 OK" in await ended(reader) if b"/health" in head else True
        await ended(reader)
        writer.close()
        assert len(pending) == 0


async def test_an_open_answer_ends_its_connection() -> None:
    pending = PendingConnections(deadline_s=3600.0)
    async with server(pending, open_health=True) as (_, port):
        reader, writer = await send(port, b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: keep-alive\r\n\r\n")
        assert (await ended(reader)).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_malformed_requests_are_logged_at_a_bounded_rate(caplog: pytest.LogCaptureFixture) -> None:
    async with server(PendingConnections()) as (_, port):
        for number in range(300):
            reader, writer = await send(port, b"GET /\x1b[2J%d HTTP/9.9\r\n\r\n" % number)
            assert b" 400 " in await ended(reader)
            writer.close()
    assert len(caplog.text) < 20_000
    assert "Traceback" not in caplog.text
    assert "\x1b" not in caplog.text


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Encoding: gzip\r\nContent-Length: 5\r\n",
        b"Content-Encoding: deflate\r\nTransfer-Encoding: chunked\r\n",
    ],
)
async def test_a_body_that_is_not_what_its_head_says_is_logged_in_one_line(
    head: bytes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request is refused, and what is left of its body is read and dropped."""
    # the budget of a logger belongs to the process: what earlier requests used of it must not decide here
    for name in ("hpcrl.network.http_server", "asyncio"):
        monkeypatch.setattr(logging.getLogger(name), "filters", [])
    async with server(PendingConnections(deadline_s=3.0)) as (_, port):
        reader, writer = await send(port, b"GET /page HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n")
        async with asyncio.timeout(20 * patience()):
            answer = await reader.readuntil(b"\r\n")
        writer.write(b"hello" if b"Length" in head else b"5\r\nhello\r\n0\r\n\r\n")
        await ended(reader)
        writer.close()
    assert b" 401 " in answer
    assert "RequestPayloadError" in caplog.text
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("path", [b"/page", b"/nobody-serves-this"])
@pytest.mark.parametrize("value", [b"1\x980-continue", b"\xff", b"odd"])
async def test_an_odd_expectation_is_refused(path: bytes, value: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with server(PendingConnections()) as (_, port):
        reader, writer = await send(port, b"GET " + path + b" HTTP/1.1\r\nHost: x\r\nExpect: " + value + b"\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 417 ")
        writer.close()
    assert "Traceback" not in caplog.text


def _mutated(randomness: random.Random) -> bytes:
    """A request that a stranger may send."""
    pieces = [b"GET ", b"/page", b" HTTP/1.1\r\n", b"Host: x\r\n", b"Content-Length: 5\r\n", b"\r\n", b"hello"]
    odd = [
        b"\x00", b"\r", b"\n", b"\xff\xfe", b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: x, chunked\r\n",
        b"Content-Length: -1\r\n", b"Content-Length: 99999999999999999999\r\n", b"Authorization: \x80\r\n",
        b"Authorization: Bearer " + b"5" * 70 + b"\r\n", b"X: " + b"y" * 9000 + b"\r\n", b"A: b\r\n" * 200,
        b"Connection: upgrade\r\nUpgrade: websocket\r\n", b"Expect: 100-continue\r\n", b"Content-Encoding: gzip\r\n",
        b"/%ff%00/..//\\", b"http://[::1", b"*", b"?" + b"&" * 500, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ]  # fmt: skip
    for _ in range(randomness.randrange(4)):
        at, what = randomness.randrange(len(pieces) + 1), randomness.random()
        if what < 0.6:
            pieces.insert(at, randomness.choice(odd))
        elif what < 0.8 and pieces:
            del pieces[min(at, len(pieces) - 1)]
        elif pieces:
            piece = bytearray(pieces[min(at, len(pieces) - 1)])
            if piece:
                piece[randomness.randrange(len(piece))] = randomness.randrange(256)
            pieces[min(at, len(pieces) - 1)] = bytes(piece)
    return b"".join(pieces)


async def _fuzz_heads(seconds: float, caplog: pytest.LogCaptureFixture) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    randomness, pending, count = random.Random(seed), PendingConnections(deadline_s=0.5), 0
    async with server(pending) as (gate, port), aiohttp.ClientSession(headers=gate.headers) as owner:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            batch = [await send(port, _mutated(randomness)) for _ in range(20)]
            for reader, writer in batch:
                answer = await ended(reader)
                for status in re.findall(rb"^HTTP/1\.[01] (\d+)", answer, re.MULTILINE):
                    # nothing is served, and nothing of a stranger is an error of ours
                    assert status[:1] == b"4" or status == b"100", answer
                writer.close()
                count += 1
            async with owner.get(f"http://127.0.0.1:{port}/page") as response:
                assert response.status == 200
    assert count > 20
    assert len(pending) == 0
    assert "Traceback" not in caplog.text


async def test_no_head_of_a_stranger_is_an_error_of_the_server(caplog: pytest.LogCaptureFixture) -> None:
    await _fuzz_heads(2.0, caplog)


@pytest.mark.campaign
async def test_no_head_of_a_stranger_is_an_error_for_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    await _fuzz_heads(60.0, caplog)


async def test_the_warehouse_ends_connections_of_strangers(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    gate = Gate("warehouse", Credentials(TOKEN, 1))
    gate.pending = PendingConnections(limit=5, deadline_s=0.3)
    listening, port = await WarehouseServer(tmp_path, gate).start("127.0.0.1", 0)
    async with listening:
        for data in (b"", b"\x00", b"\x10\x00\x00\x00half", b"\xff" * 64, b"\x91" * 4000):
            reader, writer = await send(port, data)
            await ended(reader)
            writer.close()
        crowd = [await send(port, b"") for _ in range(50)]
        await asyncio.sleep(0)
        assert len(gate.pending) <= 5
        for reader, writer in crowd:
            assert await ended(reader) == b""
            writer.close()


def test_servers_are_started_in_one_way() -> None:
    own = {"hpcrl/network/http_server.py", "hpcrl/dock/warehouse/server.py"}
    pattern = re.compile(
        r"web\.AppRunner\(|web\.TCPSite\(|web\.SockSite\(|web\.run_app|start_server\(|HTTPServer|socketserver"
    )
    found = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "hpcrl").rglob("*.py")
        if pattern.search(path.read_text(encoding="utf-8"))
    }
    assert found == own


_UVICORN = """
import asyncio, sys, uvicorn
from hpcrl.network.auth import Gate
from hpcrl.inference.vllm import uvicorn_limits
from hpcrl.inference.vllm.access import RunAccessBehindRouter
from hpcrl.network.credentials import Credentials
from hpcrl.inference.vllm import access
from hpcrl.network.connection_limits import PendingConnections

gate = Gate("vllm", Credentials("5" * 64, 1), open_health=True)
gate.pending = PendingConnections(limit=10, deadline_s=0.5)
access.gate_from_env = lambda *a, **k: gate

async def app(scope, receive, send):
    if scope["type"] == "http":
        await asyncio.sleep(1.0 if scope["path"] == "/slow" else 0.0)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

options = {"host": "127.0.0.1", "port": int(sys.argv[1]), "http": sys.argv[2]}
uvicorn.run(RunAccessBehindRouter(app), lifespan="off", access_log=False, **options)
"""


@pytest.mark.vllm
@pytest.mark.parametrize("parser", ["httptools", "h11"])
async def test_vllms_http_server_has_the_same_limits(parser: str, tmp_path: Path) -> None:
    port = free_port()
    log = tmp_path / "log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [str(VLLM_PYTHON), "-c", _UVICORN, str(port), parser], cwd=ROOT, stdout=stream, stderr=stream
        )
    try:
        headers = Credentials(TOKEN, 1).headers
        async with aiohttp.ClientSession(headers=headers) as owner:
            url = f"http://127.0.0.1:{port}"
            async with asyncio.timeout(60 * patience()):
                while True:
                    with contextlib.suppress(aiohttp.ClientConnectionError):
                        async with owner.get(f"{url}/page") as answer:
                            assert answer.status == 200
                            break
                    assert process.poll() is None, log.read_text()
                    await asyncio.sleep(0.1)
            slow = asyncio.create_task(owner.get(f"{url}/slow"))
            strangers = [await send(port, b"GET /page HT") for _ in range(100)]
            async with asyncio.timeout(20 * patience()):
                async with owner.get(f"{url}/page") as answer:
                    assert answer.status == 200
                async with await slow as answer:
                    assert answer.status == 200
            for reader, writer in strangers:
                assert await ended(reader) == b""
                writer.close()
            reader, writer = await send(port, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"200" in await ended(reader)
            writer.close()
            for _ in range(300):
                reader, writer = await send(port, b"\x16\x03 HTTP/9.9\r\n\r\n")
                await ended(reader)
                writer.close()
    finally:
        process.terminate()
        process.wait(30)
    assert log.stat().st_size < 20_000
