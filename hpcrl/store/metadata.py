"""The metadata server of the KV pool: where Mooncake's clients tell each other how memory of theirs is reached.

Mooncake's master has one of its own, which listens on all addresses of the node whatever it is told
(``--http_metadata_server_host`` of 0.3.13). This one speaks the same three calls, ``GET``, ``PUT`` and ``DELETE`` of
``/metadata?key=…``, and listens on the address of the run. Like that one it forgets all when it ends.
"""

from __future__ import annotations

import socket
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

__all__ = ["MetadataServer"]

_LARGEST_BYTES = 64 << 20
"""Of one value: a segment's description with all of its buffers is some KiB."""


class MetadataServer:
    """Serves in a thread until it is closed.

    Parameters
    ----------
    host, port:
        Where it listens, and nowhere else.

    Raises
    ------
    OSError
        It cannot listen there.
    """

    def __init__(self, host: str, port: int) -> None:
        self._server = _Server(host, port)
        self._thread = threading.Thread(target=self._server.serve_forever, name="metadata", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, host: str, port: int) -> None:
        self.values: dict[str, bytes] = {}
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), _Handler)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # clients keep their connections
    disable_nagle_algorithm = True
    server: _Server

    def do_GET(self) -> None:
        key = self._key()
        if key is not None:
            value = self.server.values.get(key)
            self._answer(HTTPStatus.NOT_FOUND if value is None else HTTPStatus.OK, value or b"metadata not found")

    def do_PUT(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        if length > _LARGEST_BYTES:
            self.close_connection = True
            self._answer(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, b"too large")
            return
        value, key = self.rfile.read(length), self._key()
        if key is not None:
            # a client that was started again on the same address describes itself anew
            self.server.values[key] = value
            self._answer(HTTPStatus.OK, b"metadata updated")

    def do_DELETE(self) -> None:
        key = self._key()
        if key is not None:
            known = self.server.values.pop(key, None) is not None
            self._answer(HTTPStatus.OK if known else HTTPStatus.NOT_FOUND, b"metadata deleted" if known else b"no")

    def log_message(self, format: str, *args: object) -> None:
        """Not a line a request."""

    def _key(self) -> str | None:
        """The key that is asked about; None where there is none, which was answered."""
        url = urlsplit(self.path)
        keys = parse_qs(url.query).get("key", [])
        if url.path != "/metadata" or len(keys) != 1:
            self._answer(HTTPStatus.BAD_REQUEST, b"metadata key is required")
            return None
        return keys[0]

    def _answer(self, status: HTTPStatus, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
