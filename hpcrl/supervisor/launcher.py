"""How a replica becomes a process: the one place that knows where roles run.

`LocalLauncher` starts them on this machine. Under Slurm another launcher puts ``srun`` with a node list or a
het-group in front; nothing above this module knows which.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from hpcrl.config.plan import Plan, Role
from hpcrl.supervisor.guard import KIND_VARIABLE, RUN_ID_VARIABLE
from hpcrl.supervisor.ports import choose_ports

__all__ = ["Address", "End", "Launcher", "LocalLauncher", "ProcessSpec", "RunningProcess"]


class Address(NamedTuple):
    """Where a replica listens."""

    host: str
    port: int

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All that is needed to start one replica; the guard reads it as JSON.

    Attributes
    ----------
    role, replica, attempt:
        Who it is.
    command, env, cwd:
        What is executed. ``env`` is the whole environment, with the run's mark in it.
    log:
        File that takes stdout and stderr.
    grace_s:
        Time between SIGTERM and SIGKILL if the supervisor is gone.
    events_path, events_writer:
        Where the guard records what the supervisor no longer can.
    """

    role: str
    replica: int
    attempt: int
    command: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    log: str
    grace_s: float
    events_path: str
    events_writer: str


class End(NamedTuple):
    """How a role process ended.

    Attributes
    ----------
    time_s:
        Seconds since the epoch, by the guard's clock where it could say.
    exit_code, signal:
        One of the two; both None where nobody saw it.
    guard_lost:
        The guard went away first, and the role with it.
    spawn_error:
        Why the command could not be started at all.
    """

    time_s: float
    exit_code: int | None = None
    signal: int | None = None
    guard_lost: bool = False
    spawn_error: str = ""

    @property
    def clean(self) -> bool:
        """Exit code 0, said by the guard."""
        return self.exit_code == 0


class RunningProcess(Protocol):
    """One replica that was started."""

    @property
    def guard_pid(self) -> int:
        """The process right below us."""

    async def started(self) -> int | None:
        """The role's pid; None where it could not be started (`ended` says why)."""

    async def ended(self) -> End:
        """Wait for the end of the role process. What it started may still be ending."""

    async def gone(self) -> list[int]:
        """Wait until nothing of the replica is left; pids of what hangs in the kernel, usually none."""

    def stop(self, grace_s: float) -> None:
        """SIGTERM to the role; after ``grace_s`` SIGKILL to all of it."""

    def kill(self) -> None:
        """SIGKILL to all of it."""


class Launcher(Protocol):
    """Starts replicas."""

    def place(self, plan: Plan) -> dict[tuple[Role, int], Address]:
        """Choose host and port of every replica of every role (HpcrlError where that cannot be)."""

    async def start(self, spec: ProcessSpec) -> RunningProcess:
        """Start a replica; returns as soon as its guard runs."""


class LocalLauncher:
    """Processes on this machine."""

    host = "127.0.0.1"

    def place(self, plan: Plan) -> dict[tuple[Role, int], Address]:
        """See `Launcher.place`."""
        replicas = [(group.role, replica) for group in plan.groups for replica in range(group.replicas)]
        ports = choose_ports(len(replicas), first=plan.first_port, last=plan.last_port, host=self.host)
        return {key: Address(self.host, port) for key, port in zip(replicas, ports, strict=True)}

    async def start(self, spec: ProcessSpec) -> RunningProcess:
        """See `Launcher.start`."""
        # not asyncio's own subprocesses: their transports SIGKILL the child when the loop closes on an error,
        # where the guard must live to clean up
        process = subprocess.Popen(
            # -P: a file `json.py` in the directory we were called in must not be imported
            [sys.executable, "-P", "-m", "hpcrl.supervisor.guard"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, KIND_VARIABLE: "guard", RUN_ID_VARIABLE: spec.env[RUN_ID_VARIABLE]},
            start_new_session=True,  # a terminal's Ctrl-C is for the one who follows, not for the roles
        )
        loop = asyncio.get_running_loop()
        reports = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reports), process.stdout)
        orders, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, process.stdin)
        return GuardedProcess(process, spec, orders, reports)


class GuardedProcess:
    """A replica below a guard, seen through the guard's reports."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        spec: ProcessSpec,
        orders: asyncio.WriteTransport,
        reports: asyncio.StreamReader,
    ) -> None:
        self._process, self._orders, self._reports = process, orders, reports
        loop = asyncio.get_running_loop()
        self._started: asyncio.Future[int | None] = loop.create_future()
        self._ended: asyncio.Future[End] = loop.create_future()
        self._left: list[int] = []
        self._send(spec)
        self._reader = asyncio.create_task(self._read(), name=f"guard of {spec.role} {spec.replica}")

    @property
    def guard_pid(self) -> int:
        """See `RunningProcess.guard_pid`."""
        return self._process.pid

    async def started(self) -> int | None:
        """See `RunningProcess.started`."""
        return await asyncio.shield(self._started)

    async def ended(self) -> End:
        """See `RunningProcess.ended`."""
        return await asyncio.shield(self._ended)

    async def gone(self) -> list[int]:
        """See `RunningProcess.gone`."""
        await asyncio.shield(self._reader)
        return self._left

    def stop(self, grace_s: float) -> None:
        """See `RunningProcess.stop`."""
        self._send({"order": "stop", "grace_s": grace_s})

    def kill(self) -> None:
        """See `RunningProcess.kill`."""
        self._send({"order": "kill"})

    def _send(self, order: object) -> None:
        if not self._orders.is_closing():
            self._orders.write(msgspec.json.encode(order) + b"\n")

    async def _read(self) -> None:
        while line := await self._reports.readline():
            report = msgspec.json.decode(line)
            match report.pop("report"):
                case "started":
                    self._started.set_result(report["pid"])
                case "spawn_failed":
                    self._started.set_result(None)
                    self._ended.set_result(End(report["time_s"], spawn_error=report["error"]))
                case "ended" if not self._ended.done():
                    self._ended.set_result(End(**report))
                case "gone":
                    self._left = report["left"]
        # the guard is gone; where it did not tell the end, the kernel has killed the role with it
        lost_at_s = time.time()
        self._orders.close()
        await asyncio.to_thread(self._process.wait)
        if not self._started.done():
            self._started.set_result(None)
        if not self._ended.done():
            self._ended.set_result(End(lost_at_s, guard_lost=True))
