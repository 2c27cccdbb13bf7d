"""Processes of a virtual cluster: started, recorded, found again, ended. Never by name alone.

A daemon is recorded by pid and start time and carries a mark in its environment, so that it is found even when the
record could not be written. A ``slurmstepd`` writes its title over its environment; its working directory, inherited
from the ``slurmd`` that we started in the node's spool directory, says whose it is. What jobs start is found by the
environment that Slurm gives it, and as descendants of a step. One thing escapes: a process that clears its environment
*and* leaves its parents (a daemon that a job started by ``env -i``) before we look.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from hpcrl.devcluster.place import ClusterPaths
from hpcrl.errors import DeadlineError
from hpcrl.processes import procfs
from hpcrl.storage.files import write_json
from hpcrl.storage.msgspec_types import prepared

_MARK = "HPCRL_DEVCLUSTER_DAEMON"
"""Its value is the cluster's directory. Shells and jobs of people never have it."""
_NODE_MARK = "HPCRL_DEVCLUSTER_NODE"
_END_DEADLINE_S = 20.0
_POLL_S = 0.05
_RESTORED_SIGNALS = (signal.SIGPIPE, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGXFSZ)


class DaemonRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One daemon as it was started. A pid means nothing after a reboot, hence ``boot_id``."""

    name: str
    pid: int
    start_ticks: int
    boot_id: str

    def process(self) -> procfs.Process | None:
        """Return the process if it is still running and is the recorded one; else None."""
        process = procfs.read_process(self.pid) if self.boot_id == procfs.boot_id() else None
        if process is None or process.start_ticks != self.start_ticks or process.dead:
            return None
        return process


class ClusterProcess(NamedTuple):
    """Running process of a cluster; ``node`` is empty for a process without a node."""

    process: procfs.Process
    kind: Literal["daemon", "step", "task"]
    node: str


def start_daemon(
    paths: ClusterPaths,
    name: str,
    argv: Sequence[str],
    *,
    directory: Path,
    node: str = "",
    env: Mapping[str, str] | None = None,
) -> DaemonRecord:
    """Start a daemon in a session of its own, without a terminal, and record it.

    What it says before it has its log file goes to ``log/<name>.start``.
    """
    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": os.environ.get("HOME", "/"),
        "LANG": "C.UTF-8",
        "SLURM_CONF": str(paths.conf),
        _MARK: str(paths.root),
        _NODE_MARK: node,
        **(env or {}),
    }
    start_log = paths.log / f"{name}.start"
    pid = os.posix_spawn(
        "/bin/sh",
        ["/bin/sh", "-c", 'cd "$0" && exec "$@"', str(directory), *argv],
        environment,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, start_log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
            # a daemon outlives its starter, and must not keep inherited locks and pipes open
            *((os.POSIX_SPAWN_CLOSE, fd) for fd in _open_files()),
        ],
        setsid=True,
        setsigmask=(),
        setsigdef=_RESTORED_SIGNALS,
    )
    process = procfs.read_process(pid)  # a child of this process that was not reaped: it exists, running or dead
    assert process is not None
    record = DaemonRecord(name=name, pid=pid, start_ticks=process.start_ticks, boot_id=procfs.boot_id())
    write_json(paths.processes / f"{name}.json", record)
    return record


def _open_files() -> list[int]:
    """Return the file descriptors that a child would get, the standard ones excepted."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the process that lists them has ended already
            if int(name) > 2 and os.get_inheritable(int(name)):
                found.append(int(name))
    return found


def read_daemons(paths: ClusterPaths) -> dict[str, DaemonRecord]:
    """Return the daemons that were started, by name, dead ones included."""
    found = {}
    for path in sorted(paths.processes.glob("*.json")):
        with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
            record = msgspec.json.decode(path.read_bytes(), type=prepared(DaemonRecord))
            found[record.name] = record
    return found


def find_processes(paths: ClusterPaths) -> list[ClusterProcess]:
    """Return all running processes of a cluster: daemons, step managers, and what jobs have started on its nodes."""
    processes = procfs.all_processes()
    members: dict[int, ClusterProcess] = {}
    for process in processes.values():
        if not process.dead and (member := _identify(paths, process)) is not None:
            members[process.pid] = member
    for record in read_daemons(paths).values():
        if (recorded := record.process()) is not None:
            members.setdefault(recorded.pid, ClusterProcess(recorded, "daemon", ""))
    # processes of a task belong to its node, also with another environment
    for step in [member for member in members.values() if member.kind == "step"]:
        for child in procfs.descendants(step.process.pid, processes):
            members.setdefault(child.pid, ClusterProcess(child, "task", step.node))
    return list(members.values())


def _identify(paths: ClusterPaths, process: procfs.Process) -> ClusterProcess | None:
    try:
        cwd = Path(os.readlink(f"/proc/{process.pid}/cwd"))
        command = Path(f"/proc/{process.pid}/comm").read_text().strip()
    except OSError:
        return None  # it ended meanwhile, or belongs to another user
    if command == "slurmstepd":
        return ClusterProcess(process, "step", cwd.name) if cwd.parent == paths.spool else None
    env = procfs.read_environ(process.pid)
    if env.get(_MARK) == str(paths.root):
        return ClusterProcess(process, "daemon", env.get(_NODE_MARK, ""))
    if env.get("SLURM_CONF") == str(paths.conf) and "SLURMD_NODENAME" in env:
        return ClusterProcess(process, "task", env["SLURMD_NODENAME"])
    return None


class Roster:
    """Members of a cluster, with those that were seen once kept until they are dead.

    When a parent dies, its children are init's, and what led to them is gone: hence the memory.

    Parameters
    ----------
    node:
        Only what belongs to this node.
    """

    def __init__(self, paths: ClusterPaths, *, node: str | None = None) -> None:
        self._paths, self._node = paths, node
        self._seen: dict[tuple[int, int], ClusterProcess] = {}

    @property
    def seen(self) -> int:
        """Return the number of processes found so far."""
        return len(self._seen)

    def find(self, *kinds: str) -> list[ClusterProcess]:
        """Find the daemons that live now, of some kinds or all."""
        for member in find_processes(self._paths):
            if self._node in (None, member.node):
                self._seen.setdefault(_identity(member.process), member)
        alive = [member for member in self._seen.values() if procfs.is_alive(*_identity(member.process))]
        return [member for member in alive if not kinds or member.kind in kinds]


def _identity(process: procfs.Process) -> tuple[int, int]:
    return process.pid, process.start_ticks


def inside_job(paths: ClusterPaths) -> bool:
    """Return whether this process runs in a job of this cluster."""
    return "SLURMD_NODENAME" in os.environ and os.environ.get("SLURM_CONF") == str(paths.conf)


def end(
    find: Callable[[], Iterable[ClusterProcess]], *, signum: int = signal.SIGKILL, deadline_s: float | None = None
) -> bool:
    """Send a signal to all that ``find`` finds, again and again until it finds nothing.

    Returns whether nothing is left at the deadline. Without a deadline, what is left then is an error.

    Raises
    ------
    DeadlineError
        Processes did not go.
    """
    stop_at = time.monotonic() + (_END_DEADLINE_S if deadline_s is None else deadline_s)
    told: set[int] = set()
    while left := list(find()):
        if time.monotonic() >= stop_at:
            if deadline_s is not None:
                return False
            pids = ", ".join(str(member.process.pid) for member in left)
            raise DeadlineError(
                f"processes {pids} did not end within {_END_DEADLINE_S:g} s of SIGKILL\n"
                "    hint: they hang in the kernel (state D) or belong to another user; see `ps`, then try again"
            )
        news = [m.process for m in left if signum == signal.SIGKILL or m.process.pid not in told]
        procfs.send_signal(news, signum)
        told |= {process.pid for process in news}
        time.sleep(_POLL_S)
        for member in left:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(member.process.pid, os.WNOHANG)
    return True


def log_tail(paths: ClusterPaths, name: str) -> str:
    """Return the last lines of a daemon's log, indented, for an error message."""
    for path in (paths.log / f"{name}.log", paths.log / f"{name}.start"):
        if path.is_file() and (text := path.read_text(errors="replace").strip()):
            return f"{path}:\n" + "\n".join(f"      {line}" for line in text.splitlines()[-8:])
    return f"{paths.log} has no output of {name}"
