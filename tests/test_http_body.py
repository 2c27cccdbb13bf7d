"""Bodies of answers whose lengths are wrong, as each caller that has no event loop, or bounds a body, takes them."""

from __future__ import annotations

import gzip
import http.client
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import aiohttp
import pytest

from hpcrl.dock.client import DockClient
from hpcrl.errors import HpcrlError, PeerLostError
from hpcrl.network import http_body
from hpcrl.network.http_body import read_body, receive_body
from hpcrl.store.admin import StoreAdmin
from hpcrl.trainer.publish.colocated_engines import ColocatedEngines

HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
DAMAGED = {
    "a length that no memory holds": HEAD + b"Content-Length: %d\r\n\r\nabc" % (1 << 61),
    "a length that no index holds": HEAD + b"Content-Length: %d\r\n\r\nabc" % (1 << 70),
    "a cut body": HEAD + b"Content-Length: 4000\r\n\r\nabc",
    "a chunk that no memory holds": CHUNKED + b"F00000000000000\r\nabc\r\n",
    "a chunk that no index holds": CHUNKED + b"FFFFFFFFFFFFFFFFFFFF\r\nabc\r\n",
    "a chunk of less than nothing": CHUNKED + b"-5\r\nabc\r\n",
    "a chunk of no number": CHUNKED + b"zz\r\nabc\r\n",
    "a cut chunk": CHUNKED + b"50\r\nabc",
    "no status": b"HTTP/1.1 abc\r\n\r\n",
    "something else than HTTP": b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
    "a header without end": HEAD + b"X: " + b"a" * 100_000 + b"\r\n\r\n",
    "many headers": HEAD + b"".join(b"X%d: 1\r\n" % i for i in range(500)) + b"\r\n",
    "no text": HEAD + b"Content-Length: 4\r\n\r\n\xff\xfe\xff\xfe",
}


@pytest.fixture
def serve() -> Iterator[Callable[[bytes], str]]:
    """Give every request the same bytes as an answer; returns the address of that server."""
    listeners: list[socket.socket] = []

    def answer(listener: socket.socket, data: bytes) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(20)
                head = b""
                while b"\r\n\r\n" not in head and (piece := connection.recv(1 << 16)):
                    head += piece
                connection.sendall(data)

    def start(data: bytes) -> str:
        listeners.append(socket.create_server(("127.0.0.1", 0)))
        threading.Thread(target=answer, args=(listeners[-1], data), daemon=True).start()
        return f"http://127.0.0.1:{listeners[-1].getsockname()[1]}"

    yield start
    for listener in listeners:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


@pytest.mark.parametrize("what", DAMAGED)
def test_callers_say_that_an_answer_is_damaged(what: str, serve: Callable[[bytes], str]) -> None:
    url = serve(DAMAGED[what])
    dock = DockClient(url, wait_timeout_s=0.05, connect_timeout_s=0.05)
    engines = ColocatedEngines([url], {}, timeout_s=20.0, start_timeout_s=20.0, on_wait=lambda: None)
    with pytest.raises(PeerLostError):
        dock.batch(1, rank=0, world_size=1)
    for call in (engines.sleep, StoreAdmin(url).status):
        with pytest.raises(HpcrlError):
            call()
    assert not StoreAdmin(url).healthy()
    engines.close()


def test_a_body_is_read_whole_up_to_its_maximum(serve: Callable[[bytes], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_body, "_PIECE", 7)
    body = bytes(range(256)) * 3
    for answer in (
        HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body,
        CHUNKED + b"100\r\n" + body[:256] + b"\r\n200\r\n" + body[256:] + b"\r\n0\r\n\r\n",
        HEAD + b"\r\n" + body,
    ):
        host, port = serve(answer).removeprefix("http://").split(":")

        def read(max_bytes: int, host: str = host, port: str = port) -> bytes:
            connection = http.client.HTTPConnection(host, int(port), timeout=20)
            try:
                connection.request("GET", "/")
                return read_body(connection.getresponse(), max_bytes)
            finally:
                connection.close()

        assert read(len(body)) == body
        with pytest.raises(http.client.HTTPException, match="longer"):
            read(len(body) - 1)


async def test_a_few_bytes_of_gzip_are_no_way_to_take_memory(serve: Callable[[bytes], str], tmp_path: Path) -> None:
    packed = gzip.compress(bytes(1 << 22))
    url = serve(HEAD + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed) + packed)
    async with aiohttp.ClientSession() as session:
        async with session.get(url) as answer:
            assert len(await receive_body(answer, 1 << 22)) == 1 << 22
        async with session.get(url) as answer:
            with pytest.raises(ValueError, match="longer than 4194303 bytes"):
                await receive_body(answer, (1 << 22) - 1)


@pytest.mark.parametrize("value", ["1e999", "1.2.3", "--", "nan"])
def test_numbers_of_the_store_that_are_none(value: str, serve: Callable[[bytes], str]) -> None:
    text = f"master_key_count {value}\n".encode()
    url = serve(HEAD + b"Content-Length: %d\r\n\r\n" % len(text) + text)
    if value == "nan":  # no number by its letters: the line counts for nothing
        assert StoreAdmin(url).status().keys == 0
        return
    with pytest.raises(HpcrlError, match="cannot be read"):
        StoreAdmin(url).status()
