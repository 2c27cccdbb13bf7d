"""Small files of a share that fails for a while, and a server of versions that is closed."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from hpcrl.errors import HandoffError
from hpcrl.network.auth import Gate
from hpcrl.weights.read import share
from hpcrl.weights.read.fanout import FanoutServer
from hpcrl.weights.read.share import read_small


class Share:
    """Reads of one file give these errors, one after the other, and then its content."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, errors: list[int], *, listed: bool) -> None:
        self.errors, self.reads = errors, 0
        monkeypatch.setattr(Path, "read_bytes", self.read)
        monkeypatch.setattr(share, "exists_uncached", lambda path: listed)
        monkeypatch.setattr(share.time, "sleep", lambda seconds: None)

    def read(self) -> bytes:
        self.reads += 1
        if self.reads <= len(self.errors):
            code = self.errors[self.reads - 1]
            raise OSError(code, os.strerror(code))
        return b"content"


@pytest.mark.parametrize(
    ("errors", "listed"),
    [
        ([errno.EIO], True),
        ([errno.ESTALE] * 5, True),
        ([errno.ENOENT] * 2, False),
        # an error of the disk says nothing of whether the file is there
        ([errno.ENOENT, errno.ENOENT, errno.EIO], False),
        ([errno.ESTALE, errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.EIO], True),
    ],
)
def test_errors_that_pass_are_waited_out(monkeypatch: pytest.MonkeyPatch, errors: list[int], listed: bool) -> None:
    found = Share(monkeypatch, errors, listed=listed)
    assert read_small(Path("/share/manifest.json")) == b"content"
    assert found.reads == len(errors) + 1


@pytest.mark.parametrize(
    ("errors", "listed", "reads", "message"),
    [
        ([errno.ENOENT] * 6, False, 3, "manifest.json does not exist"),
        ([errno.ENOENT] * 6, True, 6, "cannot be read: No such file or directory .*attempt 6; given up"),
        ([errno.EIO] * 6, True, 2, "cannot be read: Input/output error .*attempt 2; given up"),
        ([errno.EACCES], True, 1, "cannot be read: Permission denied .*attempt 1; given up"),
    ],
)
def test_errors_that_stay_are_an_error(
    monkeypatch: pytest.MonkeyPatch, errors: list[int], listed: bool, reads: int, message: str
) -> None:
    found = Share(monkeypatch, errors, listed=listed)
    with pytest.raises(HandoffError, match=message):
        read_small(Path("/share/manifest.json"))
    assert found.reads == reads


def test_a_server_that_is_closed_has_neither_port_nor_connections() -> None:
    server = FanoutServer("127.0.0.1", gate=Gate("fanout", None), node="n", fetch=lambda *_: None)
    address = urlsplit(server.start())
    with socket.create_connection(("127.0.0.1", address.port or 0), timeout=10) as held:
        held.sendall(b"GET /segments/none/none/0 HTTP/1.1\r\nHost: here\r\n\r\n")
        assert held.recv(1000).startswith(b"HTTP/1.1 404")
        server.close()
        # an answer that was given leaves the connection open, until the server goes
        held.settimeout(10)
        while held.recv(1000):
            pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", address.port or 0), timeout=10)
