"""Runs one program, and ends it with all that it has started.

``python -m hpcrl.rollouts.environments.harness.guard FD`` reads from the socket ``FD`` a JSON document that describes
the program, and answers there with another one when the program has ended. If the other side closes the socket, or
dies, the program is ended. Orphans of the program become children of this process, so that none of them outlives it,
whatever session they have made for themselves.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from typing import IO, Any

from hpcrl.processes.procfs import adopt_orphans, descendants, die_with_parent, send_signal

_HEADER_BYTES = 8
_PIECE = 1 << 16
_LOOK_S = 0.05
"""Seconds between two checks whether a program has ended, where the kernel does not report it."""
_END_S = 10.0
"""Maximum time for ending what a program has started."""


def write_document(connection: socket.socket, value: dict[str, Any]) -> None:
    """Send one JSON document."""
    data = json.dumps(value).encode()
    connection.sendall(len(data).to_bytes(_HEADER_BYTES, "big") + data)


def read_document(connection: socket.socket) -> dict[str, Any]:
    """Receive one (EOFError where the connection was closed)."""
    length = int.from_bytes(_exactly(connection, _HEADER_BYTES), "big")
    found: dict[str, Any] = json.loads(_exactly(connection, length))
    return found


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = connection.recv(min(_PIECE, count - len(data)))
        if not piece:
            raise EOFError("the connection was closed")
        data += piece
    return bytes(data)


class _Tail:
    """The last bytes of a stream."""

    def __init__(self, stream: IO[bytes], most: int) -> None:
        self.stream, self._most, self._data = stream, most, bytearray()
        os.set_blocking(stream.fileno(), False)

    def read(self) -> bool:
        """Take what is there; returns whether there may be more."""
        try:
            piece = os.read(self.stream.fileno(), _PIECE)
        except BlockingIOError:
            return True
        self._data += piece
        if len(self._data) > 2 * self._most:
            del self._data[: -self._most]
        return bool(piece)

    @property
    def text(self) -> str:
        return self._data[-self._most :].decode("utf-8", "replace")


def _run(connection: socket.socket, told: dict[str, Any]) -> dict[str, Any] | None:
    """Run a program to its end; None where the other side has closed the socket."""
    with open(told["task"], "rb") as task:
        try:
            program = subprocess.Popen(
                told["command"],
                stdin=task,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=told["directory"],
                env=told["environ"],
                start_new_session=True,
                preexec_fn=die_with_parent,  # noqa: PLW1509 - this process has one thread
            )
        except OSError as error:
            return {"error": f"{told['command'][0]}: {error.strerror or error}"}
        except ValueError as error:  # a null character, which a prompt may have
            return {"error": f"{told['command'][0]}: {error}"}
    assert program.stdout is not None
    assert program.stderr is not None
    out, err = (_Tail(stream, told["max_bytes"]) for stream in (program.stdout, program.stderr))
    deadline, timed_out = time.monotonic() + told["time_limit_s"], False
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        for tail in (out, err):
            selector.register(tail.stream, selectors.EVENT_READ, tail)
        while program.poll() is None:
            if (left := deadline - time.monotonic()) <= 0:
                timed_out = True
                break
            for key, _ in selector.select(min(_LOOK_S, left)):
                if key.data is None:
                    return None
                if not key.data.read():
                    selector.unregister(key.fileobj)
    _end_all()
    for tail in (out, err):
        while tail.read() and _has_more(tail.stream):
            pass
    return {
        "code": program.wait(),
        "timed_out": timed_out,
        "stdout": out.text,
        "stderr": err.text,
    }


def _has_more(stream: IO[bytes]) -> bool:
    """Return whether something can be read at once: who could write has ended."""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        return bool(selector.select(0))


def _end_all() -> None:
    """End all processes below this one."""
    deadline = time.monotonic() + _END_S
    while (living := descendants(os.getpid())) and time.monotonic() < deadline:
        send_signal(living, signal.SIGKILL)
        time.sleep(0.005)


def main(fd: int) -> None:
    """Run what the other side of the socket wants."""
    adopt_orphans()
    os.set_inheritable(fd, False)
    # the end comes by the socket: an interrupt of the terminal is the affair of others
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=fd) as connection:
        told: dict[str, Any] = {}
        answer: dict[str, Any] | None = None
        try:
            told = read_document(connection)
            answer = _run(connection, told)
        except EOFError:
            pass
        finally:
            _end_all()
        if answer is not None:
            with contextlib.suppress(OSError):
                write_document(connection, answer)
        elif told:
            # the process that has made it may have been killed
            shutil.rmtree(told["place"], ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
