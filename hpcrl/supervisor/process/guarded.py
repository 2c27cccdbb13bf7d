"""A replica below its guards, as the supervisor sees it: what to run, orders down, reports up, the end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from hpcrl.processes.environment_marks import KIND_VARIABLE, RUN_DIR_VARIABLE, RUN_ID_VARIABLE
from hpcrl.processes.interpreter import module_command, with_safe_path
from hpcrl.runs.clocks import Clocks
from hpcrl.supervisor.process.dumps import Dump, join_dumps
from hpcrl.supervisor.process.report_lines import LineSplitter, find_lines
from hpcrl.supervisor.process.reports import Dumped, Gone, Report, RoleEnded, Signalled, SpawnFailed, Started

_log = logging.getLogger(__name__)
_MARKS = (RUN_ID_VARIABLE, RUN_DIR_VARIABLE)
_ANSWER_S = 30.0
"""Seconds for guards, after the grace, to end their roles and report, before the supervisor kills them."""
_PIPE_S = 5.0
"""Maximum seconds that the pipe of a killed process may stay open."""
_PIECE = 1 << 16
_FOREIGN_LINES, _FOREIGN_BYTES = 5, 200
"""Maximum lines, and bytes of a line, of other programs' output in a step that the supervisor logs."""
_NO_TASKS_S = 2.0
"""The same if no task has begun: there may be no guard yet that could obey."""


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All that is needed to start one replica; the guard reads it as JSON.

    Attributes
    ----------
    role, replica, attempt:
        Identity of the replica.
    command, env, cwd:
        Command to execute. ``env`` is the whole environment, with the run's mark in it.
    logs:
        File that takes stdout and stderr, by task.
    in_step:
        Whether it is one of the tasks of a Slurm step: the guard then finds out which, fills ``{node_rank}`` in
        ``command``, and adds ``env`` to the environment of the node.
    hosts:
        Address of each node of the replica: ``{node_host}`` in ``command``, and as a value in ``env``.
    interfaces:
        The network interface of each of them: ``{node_interface}`` as a value in ``env``.
    grace_s:
        Time between SIGTERM and SIGKILL if the supervisor is gone.
    events_path, events_writer:
        Events file and writer name with which the guard records what the supervisor can no longer receive.
    restart:
        Number of earlier starts of this replica in this attempt.
    scratch:
        Directory on the node for the temporary directory of the replica; empty for the node's own choice.
    secrets:
        Additional variables: files with their values, which the guard reads.
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
    hosts: Sequence[str] = ()
    interfaces: Sequence[str] = ()
    restart: int = 0
    scratch: str = ""
    secrets: Mapping[str, str] = {}


class End(NamedTuple):
    """End of a role process.

    Attributes
    ----------
    time_s:
        Seconds since the epoch, from the guard's clock if the guard reported the end, corrected to this machine's.
    exit_code, signal:
        One of the two is set; both are None if no guard saw the end.
    guard_lost:
        The guard ended first, and the role with it.
    spawn_error:
        Reason why the command could not be started at all.
    no_step:
        It ended so because Slurm refused the step, or because the step ended before a guard ran in it.
    node:
        Slurm's name of the node whose guard reported the end; empty if none did, or on this machine.
    guard_signal:
        Signal with which another process than the supervisor asked the guard to end; under Slurm, that is Slurm.
    problem:
        Reason why the reports of its guards cannot be read any more, if that ended it.
    """

    time_s: float
    exit_code: int | None = None
    signal: int | None = None
    guard_lost: bool = False
    spawn_error: str = ""
    no_step: bool = False
    guard_signal: int | None = None
    node: str = ""
    problem: str = ""

    @property
    def clean(self) -> bool:
        """Return whether the guard reported exit code 0 and no outside signal had asked for the end."""
        return self.exit_code == 0 and self.guard_signal is None


class RunningProcess(Protocol):
    """One replica that was started."""

    @property
    def guard_pid(self) -> int:
        """Return the pid of the direct child process."""

    @property
    def silent(self) -> list[int]:
        """Return the tasks that ended without a report because their guards were killed; known once it is `gone`."""

    async def started(self) -> int | None:
        """Return the role's pid; None if it could not be started (`ended` has the reason)."""

    async def ended(self) -> End:
        """Wait for the end of the role process. What it started may still be ending."""

    async def gone(self) -> list[int]:
        """Wait until nothing of the replica is left; pids of what hangs in the kernel, usually none."""

    def stop(self, grace_s: float) -> None:
        """Send SIGTERM to the role, and SIGKILL to all its processes after ``grace_s`` seconds."""

    def kill(self) -> None:
        """Send SIGKILL to all its processes."""

    def cut_off(self) -> None:
        """Kill the direct child process: guards then see their pipe close; processes that hang are left to others."""

    async def dump(self, path: str, *, timeout_s: float) -> Dump:
        """Write the stacks of all its processes to files whose names begin with ``path``."""


def guard_command(python: str) -> list[str]:
    """Return the command line of a guard."""
    return module_command(python, "hpcrl.supervisor.process.guard")


async def start_guarded(
    argv: Sequence[str], spec: ProcessSpec, *, env: Mapping[str, str], tasks: int = 1, clocks: Clocks | None = None
) -> GuardedProcess:
    """Start guards by a command line that connects their standard streams, and send them the specification.

    Times that guards tell are corrected by ``clocks``.
    """
    # not asyncio's own subprocesses: their transports SIGKILL the child when the loop closes on an error, but the
    # guard must survive that to clean up
    process = subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={
            **with_safe_path(env),
            KIND_VARIABLE: "guard",
            **{name: spec.env[name] for name in _MARKS if name in spec.env},
        },
        start_new_session=True,  # a terminal's Ctrl-C is for the supervisor, not for the roles
    )
    loop = asyncio.get_running_loop()
    reports = asyncio.StreamReader()
    pipe, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reports), process.stdout)
    orders, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, process.stdin)
    return GuardedProcess(process, spec, orders, reports, pipe, tasks=tasks, clocks=clocks)


class GuardedProcess:
    """A replica below its guards, seen through their reports.

    A replica of several tasks (under Slurm) has a guard for each. It has ended when all tasks have ended well, or the
    first has not; the others are asked to stop then.

    A requested end always comes: if guards do not report it in time, they are ordered to kill; if that does not
    help either, the direct child process is killed, and the guards see their pipe close.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        spec: ProcessSpec,
        orders: asyncio.WriteTransport,
        reports: asyncio.StreamReader,
        pipe: asyncio.ReadTransport,
        *,
        tasks: int = 1,
        clocks: Clocks | None = None,
    ) -> None:
        self._process, self._orders, self._reports, self._pipe = process, orders, reports, pipe
        self._grace_s, self._tasks, self._in_step = spec.grace_s, tasks, spec.in_step
        self._clocks = clocks or Clocks()
        self._running: dict[int, int] = {}
        self._told: set[int] = set()
        self._clean_ends = 0
        self._guard_signal: int | None = None
        #: the first lines that others have printed into its step
        self.foreign: list[str] = []
        loop = asyncio.get_running_loop()
        self._started: asyncio.Future[int | None] = loop.create_future()
        self._ended: asyncio.Future[End] = loop.create_future()
        self._left: list[int] = []
        self._dumps: list[Dump] = []
        self._dumped: asyncio.Future[None] = loop.create_future()
        self._overdue: asyncio.TimerHandle | None = None
        self._who = f"{spec.role} {spec.replica}"
        self._send(spec)
        self._reader = asyncio.create_task(self._read(), name=f"guard of {self._who}")

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

    @property
    def silent(self) -> list[int]:
        """See `RunningProcess.silent`."""
        return sorted(set(self._running) - self._told) if self._reader.done() else []

    async def gone(self) -> list[int]:
        """See `RunningProcess.gone`."""
        await asyncio.shield(self._reader)
        return self._left

    def stop(self, grace_s: float) -> None:
        """See `RunningProcess.stop`."""
        self._send({"order": "stop", "grace_s": grace_s})
        # srun passes no order on while it waits for its nodes, and without a task there is nothing to end in order
        waits = self._in_step and not self._started.done()
        self._insist(_NO_TASKS_S - _ANSWER_S if waits else grace_s, self._cut_off if waits else self._demand_kill)

    def kill(self) -> None:
        """See `RunningProcess.kill`."""
        self._send({"order": "kill"})
        self._insist(0.0, self._cut_off)

    def _insist(self, grace_s: float, then: Callable[[], None]) -> None:
        """Do something where not all guards have gone a while after the grace; the earliest deadline counts."""
        loop = asyncio.get_running_loop()
        due = loop.time() + grace_s + _ANSWER_S
        if self._reader.done() or (self._overdue is not None and self._overdue.when() <= due):
            return
        if self._overdue is not None:
            self._overdue.cancel()
        self._overdue = loop.call_at(due, then)

    def _demand_kill(self) -> None:
        _log.warning(
            "%s: not all guards ended their roles %g s after the grace period; sending the kill order",
            self._who,
            _ANSWER_S,
        )
        self._overdue = None
        self.kill()

    def _cut_off(self) -> None:
        _log.warning("%s: not all guards obeyed in time; their connections are closed", self._who)
        self.cut_off()

    def cut_off(self) -> None:
        """See `RunningProcess.cut_off`. What hangs on a node is Slurm's to end, or that of `Launcher.end_orphans`."""
        if self._reader.done():
            return
        self._kill_group()
        # a process that left the group may keep the pipe open forever
        asyncio.get_running_loop().call_later(_PIPE_S, self._pipe.close)

    def _kill_group(self) -> None:
        """Kill the direct child process and its group, in which a wrapper of ``srun`` has ``srun``."""
        if self._process.returncode is None:  # not collected: the id cannot be another's
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def dump(self, path: str, *, timeout_s: float) -> Dump:
        """See `RunningProcess.dump`."""
        self._dumps, self._dumped = [], asyncio.get_running_loop().create_future()
        self._send({"order": "dump", "path": path})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(self._dumped)
        return join_dumps(self._dumps) or Dump([], [], [], f"its guard took no stacks within {timeout_s:g} s")

    def _send(self, order: object) -> None:
        if not self._orders.is_closing():
            self._orders.write(msgspec.json.encode(order) + b"\n")

    async def _read(self) -> None:
        """Read reports until the stream ends; in every case the replica then ends with a cause."""
        problem = ""
        try:
            await self._read_reports()
        except Exception as error:  # noqa: BLE001 - otherwise the loss of this replica's reports would go unnoticed
            problem = f"a report of its guard cannot be read ({error})"
            _log.warning("%s: %s; its step is ended", self._who, problem)
        # the guards are gone; if they did not report the end, the kernel has killed the role with them
        lost_at_s = time.time()
        if self._overdue is not None:
            self._overdue.cancel()
        self._orders.close()
        self._pipe.close()
        if problem:
            self._kill_group()
        code = await asyncio.to_thread(self._process.wait)
        if not self._ended.done():
            # the step never began: Slurm's message about it is in the supervisor's log
            never = f"srun ended with {code} before all of its tasks ran" if self._in_step and not problem else problem
            early = never if not self._started.done() else ""
            no_step = bool(early) and not self._running and not problem
            end = End(lost_at_s, guard_lost=not early, spawn_error=early, no_step=no_step, problem=problem)
            self._ended.set_result(end)
        if not self._started.done():
            self._started.set_result(None)

    async def _read_reports(self) -> None:
        splitter, ended = LineSplitter(), False
        while not ended:
            data = await self._reports.read(_PIECE)
            ended = not data
            for line in splitter.add(data):
                found = find_lines(line)
                for said in found:
                    self._take(msgspec.convert(said, Report))
                if not found and len(self.foreign) < _FOREIGN_LINES:
                    self.foreign.append(line[:_FOREIGN_BYTES].decode(errors="replace"))
                    _log.info("%s: not from its guard: %s", self._who, self.foreign[-1])

    def _take(self, report: Report) -> None:
        if not 0 <= report.task < self._tasks:
            raise ValueError(f"it is of task {report.task}, and there are {self._tasks}")
        time_s = self._clocks.corrected(report.time_s, report.node)
        match report:
            case Started():
                self._running[report.task] = report.pid
                if len(self._running) == self._tasks and not self._started.done():
                    self._started.set_result(self._running[0])
            case SpawnFailed():
                self._told.add(report.task)
                self._task_ended(End(time_s, spawn_error=report.error, node=report.node))
            case Dumped():
                self._dumps.append(Dump([report.path], report.frames, report.stopped, report.problem))
                if len(self._dumps) == self._tasks and not self._dumped.done():
                    self._dumped.set_result(None)
            case Signalled():
                self._guard_signal = report.signal
            case RoleEnded():
                self._told.add(report.task)
                self._task_ended(
                    End(time_s, report.exit_code, report.signal, node=report.node, guard_signal=self._guard_signal)
                )
            case Gone():
                self._left += report.left

    def _task_ended(self, end: End) -> None:
        self._clean_ends += end.clean
        if self._ended.done() or (end.clean and self._clean_ends < self._tasks):
            return
        self._ended.set_result(end)
        if not self._started.done():
            self._started.set_result(None)
        if self._tasks > 1:
            self.stop(self._grace_s)
