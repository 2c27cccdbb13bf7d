"""Warehouse of rollouts of the orchestrator, and the small process that serves it to other nodes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hpcrl.config.rollouts import WarehouseConfig
from hpcrl.dock.warehouse.embedded import EmbeddedWarehouse
from hpcrl.dock.warehouse.interface import Location, Pool, Warehouse
from hpcrl.dock.warehouse.mooncake_payloads import MooncakeWarehouse
from hpcrl.errors import HpcrlError
from hpcrl.network.auth import is_loopback
from hpcrl.network.credentials import TOKEN_FILE
from hpcrl.processes.interpreter import module_command
from hpcrl.runs.role import RoleContext

_log = logging.getLogger(__name__)
_START_S = 60.0
_AGAIN_S = 1.0


def make_warehouse(config: WarehouseConfig, *, url: str) -> Warehouse | None:
    """Return the warehouse of a recipe; None, with a warning, where the node permits none in files.

    Parameters
    ----------
    url:
        URL of the orchestrator; the warehouse uses the ports that follow its port.

    Raises
    ------
    HpcrlError
        The pool that the recipe configures cannot be created.
    """
    limit_bytes = int(config.limit_gib * (1 << 30))
    if config.backend == "mooncake":
        address = urlsplit(url)
        pool = Pool(address.hostname or "", (address.port or 0) + 1, config.protocol)
        try:
            return MooncakeWarehouse(pool, limit_bytes=limit_bytes)
        except OSError as error:
            hint = "rollouts.warehouse.backend: embedded needs no pool"
            raise HpcrlError(f"no pool of rollouts: {error}\n    hint: {hint}") from error
    if config.directory is None:
        return None
    try:
        return EmbeddedWarehouse(Path(config.directory), limit_bytes=limit_bytes)
    except OSError as error:
        _log.warning(
            "no warehouse of rollouts in %s (%s): ranks read rollouts from the shared filesystem\n"
            "    hint: rollouts.warehouse.directory names a directory in memory that exists on the orchestrator's node",
            config.directory,
            error,
        )
        return None


class WarehouseProcess:
    """Keeps a server of the warehouse running. It holds nothing: while there is none, ranks read the durable files.

    Attributes
    ----------
    pid:
        Id of the process; None while none runs.
    task:
        Cancelling it ends the process.
    """

    def __init__(
        self,
        context: RoleContext,
        warehouse: Warehouse | None,
        *,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        """Start the process, in a task that ``spawn`` starts.

        Nothing is served without a warehouse of files, or where only this machine reaches the orchestrator's address:
        processes of this machine can map the files.
        """
        self._pooled = warehouse.location if isinstance(warehouse, MooncakeWarehouse) else None
        self._directory = warehouse.directory if isinstance(warehouse, EmbeddedWarehouse) else None
        address = urlsplit(context.endpoints().one("orchestrator"))
        self._host, self._own_port = address.hostname or "", (address.port or 0) + 1
        self._wanted = self._directory is not None and not is_loopback(self._host)
        token = ["--token-file", str(context.run.path / TOKEN_FILE), "--attempt", str(context.attempt)]
        listen = ["--host", self._host, "--port", str(self._own_port)]
        options = ["--directory", str(self._directory), *listen, *token]
        self._command = module_command(sys.executable, "hpcrl.dock.warehouse.server", *options)
        self._port = 0
        self.pid: int | None = None
        self.task = spawn(self._run())

    def locate(self) -> Location | None:
        """Return the warehouse's location for readers, without a port while no process serves; None without one."""
        if self._pooled is not None:
            return self._pooled
        return None if self._directory is None else Location(str(self._directory), self._host, self._port)

    async def _run(self) -> None:
        """Start it, and start it again when it ends, until cancelled."""
        while self._wanted:
            await self._serve()
            await asyncio.sleep(_AGAIN_S)

    async def _serve(self) -> None:
        process = await asyncio.create_subprocess_exec(
            *self._command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        try:
            self.pid = process.pid
            async with asyncio.timeout(_START_S):
                line = await process.stdout.readline()
            self._port = int(line) if line.strip().isdigit() else 0
            code = await process.wait()
            _log.warning("the server of the warehouse of rollouts ended with code %d; another one is started", code)
        except TimeoutError:
            _log.warning("the server of the warehouse of rollouts did not start within %g s", _START_S)
        finally:
            self._port, self.pid = 0, None
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
