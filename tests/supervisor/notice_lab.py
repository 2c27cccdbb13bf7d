"""Servers on loopback that take messages, by HTTP and by SMTP."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from aiosmtpd.smtp import SMTP

from hpcrl.runs.outlets.interface import Notice


class Posted:
    """A web server that keeps what is posted.

    Attributes
    ----------
    answers:
        States of the next answers; 200 behind them. 0 takes the request and never answers.
    """

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.answers: list[int] = []
        self.retry_after = ""
        self.released = threading.Event()
        lab = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                lab.requests.append((self.path, dict(self.headers), body))
                state = lab.answers.pop(0) if lab.answers else 200
                if state == 0:
                    lab.released.wait(600.0)
                    return
                self.send_response(state)
                if state in (301, 302, 307, 308):
                    self.send_header("Location", f"http://127.0.0.1:{lab.port}/elsewhere")
                if lab.retry_after:
                    self.send_header("Retry-After", lab.retry_after)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/hook"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [body for _, _, body in self.requests]

    def stop(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def posted() -> Iterator[Posted]:
    server = Posted()
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def mail_server(handler: object, **options: Any) -> Iterator[int]:
    """A mail server in a thread; gives its port."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> asyncio.Server:
        return await loop.create_server(lambda: SMTP(handler, loop=loop, **options), "127.0.0.1", 0)

    async def stop() -> None:
        server.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    server = asyncio.run_coroutine_threadsafe(start(), loop).result()
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def make_notice(**changes: Any) -> Notice:
    fields: dict[str, Any] = {
        "id": "0123456789ab.failed-0001",
        "event": "failed",
        "name": "run-1",
        "directory": Path("/runs/run-1"),
        "attempt": 1,
        "step": 12,
        "time_s": time.time(),
        "title": "hpcrl: run run-1 failed at step 12",
        "why": ("trainer 0 failed: <@everyone> & co", "RuntimeError: no memory", "hpcrl resume run-1"),
    }
    return Notice(**{**fields, **changes})


def secret_file(path: Path, text: str) -> Path:
    path.write_text(text + "\n")
    path.chmod(0o600)
    return path
