"""A hub on loopback: the endpoints of huggingface.co that `huggingface_hub` asks for models, with faults on demand."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """One model, and what happens when it is asked for.

    Attributes
    ----------
    files:
        Bytes by name.
    large:
        Names of files that are listed by their SHA-256 and lie elsewhere, as weights do.
    listed:
        What the list of files says of one in place of the truth, by its name.
    cut_after:
        Bytes after which the next connections of a file are cut; the number of cuts that are left stands in ``cuts``.
    ends_at:
        The byte of a file at which every connection is cut.
    wrong:
        Names of files of which other bytes are sent than are listed.
    whole:
        Answer requests for the rest of a file with all of it, as some proxies do.
    refusal:
        Status and ``X-Error-Code`` of every answer.
    held:
        While it is cleared, files wait after their first bytes.
    asked:
        Name and ``Range`` of all requests for bytes of files.
    tokens:
        ``Authorization`` of requests for files, of the hub itself and of the store of large ones under another name.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.large: set[str] = set()
        self.commit = COMMIT
        self.listed: dict[str, dict[str, Any]] = {}
        self.cut_after, self.cuts = 0, 0
        self.ends_at: int | None = None
        self.wrong: set[str] = set()
        self.whole = False
        self.refusal: tuple[int, str] | None = None
        self.held = threading.Event()
        self.held.set()
        self.asked: list[tuple[str, str]] = []
        self.tokens: list[tuple[str, str]] = []
        self.url = ""

    def describe(self, revision: str) -> dict[str, Any] | None:
        """The answer to ``/api/models/OWNER/NAME``; None where there is no such revision."""
        if revision not in ("main", "v1", self.commit):
            return None
        return {
            "id": "owner/model",
            "modelId": "owner/model",
            "sha": self.commit,
            "siblings": [*map(self._entry, self.files)],
        }

    def _entry(self, name: str) -> dict[str, Any]:
        data = self.files[name]
        blob = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
        entry: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": blob}
        if name in self.large:
            entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
        return {**entry, **self.listed.get(name, {})}


@contextmanager
def serve_hub() -> Iterator[Hub]:
    """Serve a hub on a free port of loopback."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            if hub.refusal is not None:
                status, code = hub.refusal
                self._answer(status, b'{"error": "no"}', {"X-Error-Code": code} if code else {})
            elif found := re.fullmatch(r"/api/models/owner/model(?:/revision/([^?]+))?(?:\?.*)?", self.path):
                described = hub.describe(found[1] or "main")
                if described is None:
                    self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
                else:
                    self._answer(200, json.dumps(described).encode(), {"Content-Type": "application/json"})
            elif found := re.fullmatch(rf"/owner/model/resolve/{hub.commit}/(.+)", self.path):
                hub.tokens.append(("hub", self.headers.get("Authorization", "")))
                if found[1] in hub.large:
                    self._answer(302, b"", {"Location": f"http://localhost:{self.server.server_address[1]}/{found[1]}"})
                else:
                    self._file(found[1])
            elif self.path[1:] in hub.large:
                hub.tokens.append(("store", self.headers.get("Authorization", "")))
                self._file(self.path[1:])
            else:
                self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

        def _file(self, name: str) -> None:
            given = self.headers.get("Range", "")
            hub.asked.append((name, given))
            data = hub.files[name]
            if name in hub.wrong:
                data = bytes(byte ^ 1 for byte in data)
            begin = int(given.removeprefix("bytes=").rstrip("-")) if given and not hub.whole else 0
            body, headers = data[begin:], {}
            if begin:
                headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
            cut = hub.cuts > 0 and len(body) > hub.cut_after > 0
            hub.cuts -= cut
            self.send_response(206 if begin else 200)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            first = body[: hub.cut_after] if hub.cut_after else body[:1]
            if hub.ends_at is not None and len(data) > hub.ends_at:
                first, cut = data[begin : hub.ends_at], True
            self.wfile.write(first)
            self.wfile.flush()
            hub.held.wait(60)
            if cut:
                self.close_connection = True
                return
            self.wfile.write(body[len(first) :])

        def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.held.set()
        server.shutdown()
        server.server_close()
        thread.join()
