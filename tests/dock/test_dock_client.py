"""The trainer's client of a dock that starts late, and of one that goes away."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from free_ports import free_port

from hpcrl.dock.client import DockClient
from hpcrl.errors import PeerLostError


class Dock(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Be quiet."""


@pytest.fixture
def late() -> Iterator[tuple[int, threading.Event]]:
    """The port of a dock that serves one and a half seconds from now, until the event."""
    port = free_port()
    over = threading.Event()

    def serve() -> None:
        time.sleep(1.5)
        with ThreadingHTTPServer(("127.0.0.1", port), Dock) as server:
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
            thread.start()
            over.wait()
            server.shutdown()
            thread.join()

    thread = threading.Thread(target=serve)
    thread.start()
    yield port, over
    over.set()
    thread.join()


def publish_for_ever(client: DockClient) -> None:
    while True:
        client.published(1)
        time.sleep(0.05)


def test_a_dock_may_start_late_but_not_go_away(late: tuple[int, threading.Event]) -> None:
    """Engines may take minutes to start, and the orchestrator waits for them: its first answer has another limit."""
    port, over = late
    client = DockClient(f"http://127.0.0.1:{port}", wait_timeout_s=60.0, connect_timeout_s=0.2)
    client.published(0)
    over.set()
    started = time.monotonic()
    with pytest.raises(PeerLostError, match="cannot be reached"):
        publish_for_ever(client)
    assert time.monotonic() - started < 30.0


def test_a_dock_that_never_starts_is_given_up() -> None:
    client = DockClient("http://127.0.0.1:9", wait_timeout_s=0.5, connect_timeout_s=0.1)
    with pytest.raises(PeerLostError, match="cannot be reached"):
        client.published(0)
