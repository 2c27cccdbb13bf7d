"""Mooncake's master, which knows where the objects of a warehouse are and holds none of them."""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
import threading
import time

from hpcrl.dock.warehouse.interface import Pool
from hpcrl.errors import DeadlineError
from hpcrl.mooncake import program_of_master
from hpcrl.network.ports import is_free
from hpcrl.processes.die_with_parent import bound_command

_log = logging.getLogger(__name__)
_START_S = 60.0
_POLL_S = 0.05
_AGAIN_S = 1.0
_STOP_S = 5.0
_CONNECT_S = 5.0
_TTL_S = 10
"""A client that is silent for so long is forgotten, and its memory."""

_LEASE_S = 600
"""Lease of a read in seconds: a longer read fails (-707). The default of 5 s is too short for a shard. Removal does
not wait for it."""


class PoolMaster:
    """Supervisor of a master: one that ends is started again on its ports, without its state.

    It listens on the port of the pool, and on the next one, where it answers with its metrics over HTTP.

    Attributes
    ----------
    pid:
        Process id; None while it is not running.
    """

    def __init__(self, pool: Pool) -> None:
        """Start it, and wait until it listens.

        Raises
        ------
        MissingExtraError
            Mooncake is not installed.
        DeadlineError
            It does not listen within a minute.
        OSError
            Another process listens on its ports.
        """
        if taken := [port for port in (pool.port, pool.port + 1) if not is_free(pool.host, port)]:
            raise OSError(f"port {taken[0]} of {pool.host} is taken")
        flags = {
            "rpc_address": pool.host,
            "rpc_port": pool.port,
            "metrics_host": pool.host,
            "metrics_port": pool.port + 1,
            "client_ttl": _TTL_S,
            "default_kv_lease_ttl": 1000 * _LEASE_S,
            "minloglevel": 1,
        }
        command = [program_of_master(), *(f"--{name}={value}" for name, value in flags.items())]
        # the thread below lasts as long as this process, and the master ends with it, also by SIGKILL
        self._command = bound_command(command)
        self._pool, self._closed = pool, threading.Event()
        self.pid: int | None = None
        self._thread = threading.Thread(target=self._run, name="pool-master", daemon=True)
        self._thread.start()
        deadline = time.monotonic() + _START_S
        while not _listens(pool):
            if time.monotonic() > deadline:
                self.close()
                raise DeadlineError(
                    f"mooncake_master does not listen on {pool.master} within {_START_S:g} s\n"
                    "    hint: the orchestrator's log has its output; rollouts.warehouse.backend: embedded needs none"
                )
            time.sleep(_POLL_S)

    def _run(self) -> None:
        said = False
        while not self._closed.is_set():
            try:
                process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL)
            except OSError as error:  # memory, processes or a file system are missing temporarily
                if not said:
                    _log.warning("mooncake_master cannot be started, and is tried again: %s", error)
                said = True
            else:
                said = False
                with process:
                    self._attend(process)
            self.pid = None
            self._closed.wait(_AGAIN_S)

    def _attend(self, process: subprocess.Popen[bytes]) -> None:
        """Wait until the process ends, or is to end."""
        self.pid = process.pid
        while process.poll() is None and not self._closed.wait(_POLL_S):
            pass
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
            process.kill()
        else:
            said = "mooncake_master ended with code %d, and all rollouts in memory are lost; it is started again"
            _log.warning(said, process.returncode)

    def close(self) -> None:
        """End the master's process."""
        self._closed.set()
        self._thread.join(2 * _STOP_S)


def _listens(pool: Pool) -> bool:
    with contextlib.suppress(OSError):
        reach(pool)
        return True
    return False


def reach(pool: Pool) -> None:
    """See that the master can be reached (OSError where not): Mooncake's own attempts take a minute and a half."""
    socket.create_connection((pool.host, pool.port), timeout=_CONNECT_S).close()
