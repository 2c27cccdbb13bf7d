"""Somebody who knows nothing of the run, and sends to a port of it whatever comes to mind."""

from __future__ import annotations

import contextlib
import http.client
import socket
import time

_SAID = (
    b"\x00\x01\x02\xff\xfe" * 40,
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET /" + b"a" * 20000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /inference/v1/generate HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n{}",
    b"POST /inference/v1/generate HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999\r\n\r\n",
    b"POST /finish_weight_update HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
    b"POST /finish_weight_update HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    b"GET /health HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + b"f" * 64 + b".1\r\n\r\n",
    b"GET /health HTTP/1.1\r\n" + b"X: y\r\n" * 3000 + b"\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"",
)
"""The last one says nothing, and keeps its connection."""
_SILENT = 40


def disturb(host: str, port: int, seconds: float) -> float:
    """Send damaged requests for some seconds; return how long ``/health`` took at most meanwhile."""
    deadline, longest, number = time.monotonic() + seconds, 0.0, 0
    silent: list[socket.socket] = []
    try:
        while time.monotonic() < deadline:
            for said in _SAID:
                with contextlib.suppress(OSError):
                    connection = socket.create_connection((host, port), timeout=2.0)
                    if not said and len(silent) < _SILENT:
                        silent.append(connection)
                        continue
                    with connection:
                        connection.settimeout(0.05)
                        connection.sendall(said)
                        connection.recv(4096)
            number += 1
            if number % 3 == 0:
                longest = max(longest, longest_health_s(host, port))
            time.sleep(0.05)
        return longest
    finally:
        for connection in silent:
            connection.close()


def longest_health_s(host: str, port: int, limit_s: float = 20.0) -> float:
    """Return how long a server takes to answer a whole request, whatever the answer."""
    began = time.monotonic()
    connection = http.client.HTTPConnection(host, port, timeout=limit_s)
    try:
        connection.request("GET", "/health")
        connection.getresponse().read()
    except OSError:
        return limit_s
    finally:
        connection.close()
    return time.monotonic() - began
