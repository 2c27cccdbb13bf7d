"""Processes of this machine by pid, parentage and environment, read from ``/proc``. Standard library only.

A pid alone names nothing: the kernel gives it away again. A process is named here by pid *and* start time, and
signals go through a pidfd, so that a process that took over a pid is never hit.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterable, Mapping
from typing import NamedTuple

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_DEAD_STATES = "ZXx"


class Process(NamedTuple):
    """One process at one moment.

    Attributes
    ----------
    pid, ppid, session:
        Ids of the process, its parent and its session.
    state:
        The kernel's letter: ``R``, ``S``, ``D``, ``Z`` …
    threads:
        Number of threads.
    start_ticks:
        Start time in clock ticks since boot; with the pid it names the process.
    """

    pid: int
    ppid: int
    session: int
    state: str
    threads: int
    start_ticks: int

    @property
    def dead(self) -> bool:
        """Return whether the process has ended and only waits to be reaped.

        A process whose first thread has ended also shows as a zombie while other threads still run; it is not dead.
        """
        return self.state in _DEAD_STATES and self.threads <= 1


def read_process(pid: int) -> Process | None:
    """Return the process with this pid; None if there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:
            text = stream.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # the name in parentheses may contain spaces and parentheses: fields are fixed after the last parenthesis
    fields = text[text.rindex(b")") + 2 :].split()
    return Process(
        pid=pid,
        ppid=int(fields[1]),
        session=int(fields[3]),
        state=fields[0].decode(),
        threads=int(fields[17]),
        start_ticks=int(fields[19]),
    )


def all_processes() -> dict[int, Process]:
    """Return every current process, by pid."""
    found = (read_process(int(name)) for name in os.listdir("/proc") if name.isdecimal())
    return {process.pid: process for process in found if process is not None}


def descendants(root: int, processes: Mapping[int, Process] | None = None) -> list[Process]:
    """Return children of ``root``, their children and so on, without dead ones.

    ``processes`` is what `all_processes` returned; by default it is asked now.
    """
    processes = all_processes() if processes is None else processes
    children: dict[int, list[Process]] = {}
    for process in processes.values():
        children.setdefault(process.ppid, []).append(process)
    found: list[Process] = []
    queue = [root]
    while queue:
        for process in children.get(queue.pop(), ()):
            queue.append(process.pid)
            found.append(process)
    return [process for process in found if not process.dead]


def ancestors(pid: int) -> list[int]:
    """Return the parent of ``pid``, its parent and so on, up to the first process of the machine."""
    found: list[int] = []
    process = read_process(pid)
    while process is not None and process.ppid > 0:
        found.append(process.ppid)
        process = read_process(process.ppid)
    return found


def read_environ(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with; empty if it cannot be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as stream:
            text = stream.read()
    except OSError:
        return {}
    pairs = (entry.partition(b"=") for entry in text.split(b"\0") if b"=" in entry)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def with_environ(name: str, value: str) -> list[Process]:
    """Return live processes that were started with ``name=value`` in their environment."""
    entry = os.fsencode(f"{name}={value}")
    found = []
    for process in all_processes().values():
        try:
            with open(f"/proc/{process.pid}/environ", "rb") as stream:
                matches = entry in stream.read().split(b"\0")
        except OSError:
            continue  # ended meanwhile, or another user's
        if matches and not process.dead:
            found.append(process)
    return found


def is_alive(pid: int, start_ticks: int) -> bool:
    """Return whether the process with this pid and start time still runs (a zombie does not)."""
    process = read_process(pid)
    return process is not None and process.start_ticks == start_ticks and not process.dead


def send_signal(processes: Iterable[Process], signum: int) -> None:
    """Send a signal to each of these processes that still exists."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            _send(process, signum)


def _send(process: Process, signum: int) -> None:
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        raise
    except OSError:  # kernels before 5.3 have no pidfd: check and send, a hair less safe
        if is_alive(process.pid, process.start_ticks):
            os.kill(process.pid, signum)
        return
    try:
        if is_alive(process.pid, process.start_ticks):
            signal.pidfd_send_signal(pidfd, signum)
    finally:
        os.close(pidfd)


def adopt_orphans() -> None:
    """Become the parent of every orphaned descendant (``PR_SET_CHILD_SUBREAPER``; OSError if refused)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent dies (``PR_SET_PDEATHSIG``; OSError where refused).

    It survives ``exec``.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def hostname() -> str:
    """Name of this machine."""
    return os.uname().nodename


def boot_id() -> str:
    """Return the boot id of the machine, from whose boot start times of processes count; empty if it cannot be read."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as stream:
            return stream.read().strip()
    except OSError:
        return ""
