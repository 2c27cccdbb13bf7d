"""The package ``mooncake``, where it is installed: its client, its transfer engine, and the program of its master."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
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
_ANSWER_S = 30.0
"""Maximum seconds of a read of no bytes; more are allowed for its bytes, at `_SLOWEST_BYTES_PER_S`."""
_GIVES_UP_S = 4.5
"""Seconds after which the engine's own call may have given up a transfer that it had begun: ``MC_TRANSFER_TIMEOUT`` is
5 s at least, and 30 s without that variable."""
_SLOWEST_BYTES_PER_S = 1 << 30
_FAILED = -1
_ENDED = (1, _FAILED)
"""States of a transfer that is over, and that the engine has forgotten. One whose time is up (-2) may still write."""
_SHORTEST_LOOK_S = 5e-5
_LONGEST_LOOK_S = 4e-3
"""Maximum seconds between two looks at a transfer: the pause is an eighth of the time it has taken so far."""


class PendingTransferError(OSError):
    """Raised where a read takes too long. The engine may still write into the memory that was given for it."""

    def __init__(self, message: str, is_pending: Callable[[], bool]) -> None:
        """Keep ``is_pending``: whether the engine may still write; one thread at a time calls it."""
        super().__init__(message)
        self.is_pending = is_pending


class TransferEngine:
    """Mooncake's transfer engine: it serves registered memory of this process, and reads that of others.

    It listens on a port of its own on all addresses, and does not authenticate clients.

    Attributes
    ----------
    endpoint:
        Name under which other engines reach this one: host and port.
    forgotten:
        `forget_engine` was called: no further memory is registered with it.
    """

    forgotten = False

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

        This process need not have registered its own memory over TCP. A transfer is waited for half a minute, a peer
        that takes connections and says nothing a minute; other reads of this engine that begin meanwhile wait with it.

        Parameters
        ----------
        endpoint:
            The other engine.
        local, remote, sizes:
            Of each stretch: the address here, the address there, and its length.

        Raises
        ------
        PendingTransferError
            It takes too long, and the engine may still write into the memory here.
        OSError
            The other process is away, or has registered no such memory. Nothing is written any more.
        """
        began_s = time.monotonic()
        for _ in range(_TRIES):
            done = self._read_once(endpoint, local, remote, sizes)
            if done or time.monotonic() - began_s > _PROMPT_S:
                break
        if not done:
            raise OSError(f"{endpoint} did not give {sum(sizes):,} bytes")

    def _read_once(self, endpoint: str, local: Sequence[int], remote: Sequence[int], sizes: Sequence[int]) -> bool:
        """Return whether all is there; no transfer is under way then (see `read` for errors).

        The engine's own call for several stretches waits without a pause: each thread that waits takes a processor from
        those that transfer.
        """
        began_s, transfers, failed, lost = time.monotonic(), [], False, False
        limit_s = _ANSWER_S + sum(sizes) / _SLOWEST_BYTES_PER_S
        for stretch in zip(local, remote, sizes, strict=True):
            own, other, size = ([number] for number in stretch)
            asked_s = time.monotonic()
            if transfer := self._engine.batch_transfer_async_read(endpoint, own, other, size):
                transfers.append(transfer)
                continue
            refused_s = time.monotonic()
            if refused_s - asked_s > _PROMPT_S:
                # the peer takes connections and says nothing: no transfer has begun, and the other call would take as
                # long, which looks as if one had
                failed = True
                break
            if self._engine.batch_transfer_sync_read(endpoint, own, other, size):
                # it could not begin; this call, unlike the other one, also forgets what the engine knew of the peer
                failed, lost = True, time.monotonic() - refused_s > _GIVES_UP_S
                break
        while True:
            states = [(transfer, self._engine.transfer_check_status(transfer)) for transfer in transfers]
            failed = failed or any(state == _FAILED for _, state in states)
            transfers = [transfer for transfer, state in states if state not in _ENDED]
            spent_s = time.monotonic() - began_s
            if not transfers and not lost:
                return not failed
            if spent_s > limit_s or lost:
                # of a transfer that the engine's own call has given up nothing is known any more
                pending = (lambda: True) if lost else self._watch(transfers)
                raise PendingTransferError(f"{endpoint} did not give {sum(sizes):,} bytes in {limit_s:.0f} s", pending)
            time.sleep(min(_LONGEST_LOOK_S, max(_SHORTEST_LOOK_S, spent_s / 8)))

    def _watch(self, transfers: list[int]) -> Callable[[], bool]:
        """Return a function that returns whether one of ``transfers`` is still under way."""

        def is_pending() -> bool:
            transfers[:] = [each for each in transfers if self._engine.transfer_check_status(each) not in _ENDED]
            return bool(transfers)

        return is_pending


_engines: dict[tuple[str, str], TransferEngine] = {}
_starting = threading.Lock()


def shared_engine(host: str, protocol: str) -> TransferEngine:
    """Return the one transfer engine of this process for an address and a protocol; errors as of `TransferEngine`."""
    with _starting:
        if (host, protocol) not in _engines:
            _engines[host, protocol] = TransferEngine(host, protocol)
        return _engines[host, protocol]


def forget_engine(engine: TransferEngine) -> None:
    """Let `shared_engine` start another one in place of ``engine``, which ends when it is no longer used.

    An engine remembers the ports of a peer for as long as it lives. Where a new process has the name of an old one, and
    other ports, each read of it fails.
    """
    with _starting:
        engine.forgotten = True
        for key in [key for key, known in _engines.items() if known is engine]:
            del _engines[key]


def program_of_master() -> str:
    """Return the path of Mooncake's master in this environment (MissingExtraError if there is none)."""
    beside = Path(sys.executable).with_name("mooncake_master")
    found = str(beside) if beside.is_file() else shutil.which("mooncake_master")
    if found is None:
        raise MissingExtraError("store", "mooncake")
    return found
