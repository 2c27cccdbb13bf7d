"""The package ``mooncake``, where it is installed: its client, its transfer engine, and the program of its master."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from hpcrl.errors import HpcrlError, MissingExtraError


def load_client() -> Any:
    """Return the module ``mooncake.store``.

    Raises
    ------
    MissingExtraError
        It is not installed.
    HpcrlError
        It cannot be loaded: a library of the system is missing.
    """
    return _load("mooncake.store")


def _load(module: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise MissingExtraError("store", "mooncake") from error
    except ImportError as error:
        raise HpcrlError(
            f"mooncake cannot be loaded: {error}\n    hint: apt-get install libibverbs1 librdmacm1 libnuma1 libcurl4"
        ) from error


_TRIES = 8
"""Maximum tries of a read that fails promptly.

The engine keeps connections. After a peer has ended, another one may get its port: each connection that was kept fails
once, then it is dropped.
"""
_PROMPT_S = 1.0
"""Maximum seconds after which a read that failed is tried again."""


class TransferEngine:
    """Mooncake's transfer engine: it serves registered memory of this process, and reads that of others.

    It listens on a port of its own on all addresses, and does not authenticate clients.

    Attributes
    ----------
    endpoint:
        Name under which other engines reach this one: host and port.
    """

    def __init__(self, host: str, protocol: str) -> None:
        """Start an engine.

        Parameters
        ----------
        host:
            Address at which others reach this process.
        protocol:
            ``tcp`` or ``rdma``.

        Raises
        ------
        MissingExtraError, HpcrlError
            Mooncake is not installed, or cannot be loaded.
        OSError
            The engine does not start.
        """
        os.environ.setdefault("MC_LOG_LEVEL", "WARNING")  # it logs each connection otherwise
        self._engine = _load("mooncake.engine").TransferEngine()
        shown = f"[{host}]" if ":" in host else host
        code = self._engine.initialize(shown, "P2PHANDSHAKE", protocol, "")
        if code != 0:
            raise OSError(f"the transfer engine does not start at {host} over {protocol}: code {code}")
        self.endpoint = f"{shown}:{self._engine.get_rpc_port()}"

    def register(self, address: int, size: int) -> None:
        """Register memory, so that it can be read by others, or into (OSError if that is refused)."""
        code = self._engine.register_memory(address, size)
        if code != 0:
            raise OSError(f"{size:,} bytes of memory cannot be registered for the fabric: code {code}")

    def unregister(self, address: int) -> None:
        """End a registration."""
        self._engine.unregister_memory(address)

    def read(self, endpoint: str, local: Sequence[int], remote: Sequence[int], sizes: Sequence[int]) -> None:
        """Read stretches of registered memory of another process; returns when all are there.

        A peer that does not answer is waited for half a minute.

        Parameters
        ----------
        endpoint:
            The other engine.
        local, remote, sizes:
            Of each stretch: the address here, the address there, and its length.

        Raises
        ------
        OSError
            The other process is away, or has registered no such memory.
        """
        began_s = time.monotonic()
        for _ in range(_TRIES):
            code = self._engine.batch_transfer_sync_read(endpoint, list(local), list(remote), list(sizes))
            if code == 0 or time.monotonic() - began_s > _PROMPT_S:
                break
        if code != 0:
            raise OSError(f"{endpoint} did not give {sum(sizes):,} bytes: code {code}")


_engines: dict[tuple[str, str], TransferEngine] = {}
_starting = threading.Lock()


def shared_engine(host: str, protocol: str) -> TransferEngine:
    """Return the one transfer engine of this process for an address and a protocol; errors as of `TransferEngine`."""
    with _starting:
        if (host, protocol) not in _engines:
            _engines[host, protocol] = TransferEngine(host, protocol)
        return _engines[host, protocol]


def program_of_master() -> str:
    """Return the path of Mooncake's master in this environment (MissingExtraError if there is none)."""
    beside = Path(sys.executable).with_name("mooncake_master")
    found = str(beside) if beside.is_file() else shutil.which("mooncake_master")
    if found is None:
        raise MissingExtraError("store", "mooncake")
    return found
