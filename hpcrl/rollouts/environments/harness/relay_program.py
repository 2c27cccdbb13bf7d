"""Runs inside a sandbox: gives a program ports on the loopback interface that lead to unix sockets, and runs it.

``python3 -I relay_program.py RELAY.json`` needs nothing but Python's standard library: its text is copied into the
sandbox. The file has ``command``, ``environ`` and ``errors`` (the file for the program's errors), and ``ports``: paths
of unix sockets by port. Its exit code is that of the program; a signal's is 128 and its number.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading

_CHUNK = 1 << 16
_BACKLOG = 64


def pump(source: socket.socket, target: socket.socket) -> None:
    """Copy bytes until the source ends, and tell the target of that end."""
    with contextlib.suppress(OSError):
        while data := source.recv(_CHUNK):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def join(accepted: socket.socket, path: str) -> None:
    """Join a connection with a unix socket until both sides have ended."""
    with accepted, socket.socket(socket.AF_UNIX) as outside:
        try:
            outside.connect(path)
        except OSError:
            return
        back = threading.Thread(target=pump, args=(outside, accepted), daemon=True)
        back.start()
        pump(accepted, outside)
        back.join()


def serve(listener: socket.socket, path: str) -> None:
    """Accept connections until the process ends."""
    while True:
        try:
            accepted, _ = listener.accept()
        except OSError:
            continue
        threading.Thread(target=join, args=(accepted, path), daemon=True).start()


def main() -> int:
    """Listen, run the program and return its exit code."""
    with open(sys.argv[1], encoding="utf-8") as file:
        told = json.load(file)
    for port, path in told["ports"].items():
        listener = socket.create_server(("127.0.0.1", int(port)), backlog=_BACKLOG)
        threading.Thread(target=serve, args=(listener, path), daemon=True).start()
    with open(told["errors"], "wb") as errors:
        try:
            ended = subprocess.run(told["command"], env=told["environ"], stderr=errors, check=False)
        except OSError as error:
            errors.write(f"it cannot be started: {error}\n".encode())
            return 127
    return ended.returncode if ended.returncode >= 0 else 128 - ended.returncode


if __name__ == "__main__":
    sys.stdout.flush()
    os._exit(main())
