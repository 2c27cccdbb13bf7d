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
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from hpcrl.config.plan import Plan, Role
from hpcrl.supervisor.guard import KIND_VARIABLE, RUN_ID_VARIABLE
from hpcrl.supervisor.ports import choose_ports
from hpcrl.supervisor.sweep import end_orphans, sweep

__all__ = [
    "Address",
    "End",
    "GuardedProcess",
    "Launcher",
    "LocalLauncher",
    "ProcessSpec",
    "RunningProcess",
    "guard_command",
    "start_guarded",
]


class Address(NamedTuple):
    """Where a replica listens, and what it runs on."""

    host: str
    port: int
    nodes: tuple[str, ...] = ()
    """Slurm's names of the replica's nodes; empty on this machine."""

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
    logs:
        File that takes stdout and stderr, by task.
    in_step:
        Started as one of the tasks of a Slurm step: the guard says which, fills ``{node_rank}`` in ``command``, and
        ``env`` comes on top of what the node has.
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
    logs: Sequence[str]
    grace_s: float
    events_path: str
    events_writer: str
    in_step: bool = False


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
    guard_signal:
        Signal by which somebody else than the supervisor had told the guard to end it; under Slurm, that is Slurm.
    """

    time_s: float
    exit_code: int | None = None
    signal: int | None = None
    guard_lost: bool = False
    spawn_error: str = ""
    guard_signal: int | None = None

    @property
    def clean(self) -> bool:
        """Exit code 0 by itself, said by the guard."""
        return self.exit_code == 0 and self.guard_signal is None


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

    @property
    def in_step(self) -> bool:
        """Whether replicas are steps of a Slurm job."""

    def place(self, plan: Plan) -> dict[tuple[Role, int], Address]:
        """Choose host and port of every replica of every role (HpcrlError where that cannot be)."""

    async def start(self, spec: ProcessSpec) -> RunningProcess:
        """Start a replica; returns as soon as its guard runs."""

    def sweep(self, run_id: str) -> list[int]:
        """End what an earlier attempt left behind, before this one starts; returns the pids. Blocks for a moment."""

    def end_orphans(self, run_id: str, guards: Collection[int]) -> list[int]:
        """End what no living guard is above; returns the pids. ``guards`` are those that live."""

    def failed_nodes(self) -> list[str]:
        """Nodes of the run that are down, as far as can be said at once. Blocks for a moment."""


class LocalLauncher:
    """Processes on this machine."""

    host = "127.0.0.1"
    in_step = False

    def place(self, plan: Plan) -> dict[tuple[Role, int], Address]:
        """See `Launcher.place`."""
        replicas = [(group.role, replica) for group in plan.groups for replica in range(group.replicas)]
        ports = choose_ports(len(replicas), first=plan.first_port, last=plan.last_port, host=self.host)
        return {key: Address(self.host, port) for key, port in zip(replicas, ports, strict=True)}

    async def start(self, spec: ProcessSpec) -> RunningProcess:
        """See `Launcher.start`."""
        return await start_guarded(guard_command(sys.executable), spec, env=os.environ)

    def sweep(self, run_id: str) -> list[int]:
        """See `Launcher.sweep`."""
        return [process.pid for process in sweep(run_id)]

    def end_orphans(self, run_id: str, guards: Collection[int]) -> list[int]:
        """See `Launcher.end_orphans`."""
        return [process.pid for process in end_orphans(run_id, guards)]

    def failed_nodes(self) -> list[str]:
        """See `Launcher.failed_nodes`: we would not be here."""
        return []


def guard_command(python: str) -> list[str]:
    """The command line of a guard."""
    # -P: a file `json.py` in the directory we were called in must not be imported
    return [python, "-P", "-m", "hpcrl.supervisor.guard"]


async def start_guarded(
    argv: Sequence[str], spec: ProcessSpec, *, env: Mapping[str, str], tasks: int = 1
) -> GuardedProcess:
    """Start guards by a command line that joins their standard streams to ours, and tell them what to run."""
    # not asyncio's own subprocesses: their transports SIGKILL the child when the loop closes on an error,
    # where the guard must live to clean up
    process = subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**env, KIND_VARIABLE: "guard", RUN_ID_VARIABLE: spec.env[RUN_ID_VARIABLE]},
        start_new_session=True,  # a terminal's Ctrl-C is for the one who follows, not for the roles
    )
    loop = asyncio.get_running_loop()
    reports = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reports), process.stdout)
    orders, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, process.stdin)
    return GuardedProcess(process, spec, orders, reports, tasks=tasks)


class GuardedProcess:
    """A replica below its guards, seen through their reports.

    A replica of several tasks (under Slurm) has a guard for each. It has ended when all tasks have ended well, or the
    first has not; the others are asked to stop then.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        spec: ProcessSpec,
        orders: asyncio.WriteTransport,
        reports: asyncio.StreamReader,
        *,
        tasks: int = 1,
    ) -> None:
        self._process, self._orders, self._reports = process, orders, reports
        self._grace_s, self._tasks, self._in_step = spec.grace_s, tasks, spec.in_step
        self._running: dict[int, int] = {}
        self._clean_ends = 0
        self._guard_signal: int | None = None
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
            task = report.pop("task")
            match report.pop("report"):
                case "started":
                    self._running[task] = report["pid"]
                    if len(self._running) == self._tasks and not self._started.done():
                        self._started.set_result(self._running[0])
                case "spawn_failed":
                    self._task_ended(End(report["time_s"], spawn_error=report["error"]))
                case "signalled":
                    self._guard_signal = report["signal"]
                case "ended":
                    self._task_ended(End(**report, guard_signal=self._guard_signal))
                case "gone":
                    self._left += report["left"]
        # the guards are gone; where they did not tell the end, the kernel has killed the role with them
        lost_at_s = time.time()
        self._orders.close()
        code = await asyncio.to_thread(self._process.wait)
        if not self._ended.done():
            # a step that never was: Slurm's words about it are in our own log
            never = f"srun ended with {code} before all of its tasks ran" if self._in_step else ""
            early = never if not self._started.done() else ""
            self._ended.set_result(End(lost_at_s, guard_lost=not early, spawn_error=early))
        if not self._started.done():
            self._started.set_result(None)

    def _task_ended(self, end: End) -> None:
        self._clean_ends += end.clean
        if self._ended.done() or (end.clean and self._clean_ends < self._tasks):
            return
        self._ended.set_result(end)
        if not self._started.done():
            self._started.set_result(None)
        if self._tasks > 1:
            self.stop(self._grace_s)
