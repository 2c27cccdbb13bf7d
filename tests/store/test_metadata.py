"""The metadata server of the KV pool bounds what anybody who reaches it can take."""

from __future__ import annotations

import contextlib
import http.client
import logging
import socket
import threading
from collections.abc import Iterator

import pytest
from patience import patience, wait_for

from hpcrl.store import metadata
from hpcrl.store.metadata import MetadataServer


@pytest.fixture
def server() -> Iterator[MetadataServer]:
    with contextlib.closing(MetadataServer("127.0.0.1", 0)) as made:
        yield made


def ask(server: MetadataServer, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10 * patience())
    with contextlib.closing(connection):
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.read()


def send(server: MetadataServer, data: bytes) -> bytes:
    """Send bytes as they are; return the beginning of the answer."""
    with socket.create_connection(("127.0.0.1", server.port), 10 * patience()) as connection:
        connection.sendall(data)
        return connection.recv(65536)


def test_values_are_kept_replaced_and_removed(server: MetadataServer) -> None:
    path = "/metadata?key=mooncake%2Fram%2F10.0.0.1%3A1"
    assert ask(server, "GET", path) == (404, b"metadata not found")
    for value in (b"one", b"", b"\x00two" * 1000):
        assert ask(server, "PUT", path, value)[0] == 200
        assert ask(server, "GET", path) == (200, value)
    assert ask(server, "DELETE", path)[0] == 200
    assert ask(server, "DELETE", path)[0] == 404
    assert ask(server, "GET", path)[0] == 404


def test_a_body_in_chunks_is_stored_whole(server: MetadataServer) -> None:
    head = b"PUT /metadata?key=k HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert b" 200 " in send(server, head + b"5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n")
    assert ask(server, "GET", "/metadata?key=k") == (200, b"hello world")


@pytest.mark.parametrize("length", [b"-1", b"abc", b"", b"1 2", b"+5", b"0x10", b"1_0", b"9" * 400])
def test_a_wrong_length_is_refused(server: MetadataServer, length: bytes, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    head = b"PUT /metadata?key=k HTTP/1.1\r\nHost: x\r\nContent-Length: " + length + b"\r\n\r\n"
    answer = send(server, head + b"x" * 100)
    assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.0 400", b"HTTP/1.1 413"))
    assert ask(server, "GET", "/metadata?key=k")[0] == 404
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("path", ["/metadata", "/metadata?key=a&key=b", "/metadata?key=" + "k" * 2000])
def test_a_key_is_one_and_bounded(server: MetadataServer, path: str) -> None:
    assert ask(server, "PUT", path, b"value")[0] == 400


def test_memory_is_bounded(server: MetadataServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "_MAX_TOTAL_BYTES", 1000)
    assert ask(server, "PUT", "/metadata?key=a", b"x" * 900)[0] == 200
    assert ask(server, "PUT", "/metadata?key=b", b"x" * 900)[0] == 507
    assert ask(server, "PUT", "/metadata?key=a", b"x" * 990)[0] == 200  # in place of the first
    assert ask(server, "PUT", "/metadata?key=a", b"")[0] == 200
    assert ask(server, "PUT", "/metadata?key=b", b"x" * 900)[0] == 200
    assert ask(server, "DELETE", "/metadata?key=b")[0] == 200
    assert ask(server, "PUT", "/metadata?key=c", b"x" * 990)[0] == 200
    head = f"PUT /metadata?key=k HTTP/1.1\r\nHost: x\r\nContent-Length: {(16 << 20) + 1}\r\n\r\n"
    assert b" 413 " in send(server, head.encode())


def test_silent_connections_have_no_thread_and_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "_IDLE_S", 2.0)
    threads = threading.active_count()
    with contextlib.closing(MetadataServer("127.0.0.1", 0)) as server, contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 10 * patience()))
            for _ in range(50)
        ]
        half = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 10 * patience()))
        half.sendall(b"GET /metadata?key=a HT")
        kept = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 10 * patience()))
        kept.sendall(b"GET /metadata?key=a HTTP/1.1\r\nHost: x\r\n\r\n")
        assert kept.recv(65536).startswith(b"HTTP/1.1 404")
        assert threading.active_count() <= threads + 2
        for connection in (*silent, half, kept):
            # closed or reset by the server
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""
        wait_for(lambda: len(server._server.idle) == 0, 10.0, "end of all connections")


def test_a_body_that_never_comes_has_an_end(monkeypatch: pytest.MonkeyPatch, server: MetadataServer) -> None:
    monkeypatch.setattr(metadata, "_REQUEST_S", 0.2)
    with socket.create_connection(("127.0.0.1", server.port), 10 * patience()) as connection:
        connection.sendall(b"PUT /metadata?key=a HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nhalf")
        assert connection.recv(65536).startswith(b"HTTP/1.1 408")


def test_an_address_that_is_taken_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        MetadataServer("127.0.0.1", taken.getsockname()[1])
