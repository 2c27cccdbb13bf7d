"""Ending processes with all of their descendants, while they make new ones. Standard library only."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable

from hpcrl.processes.procfs import Process, descendants, read_process, send_signal

_MAX_ROUNDS = 200
_STOP_S = 0.5
"""Maximum seconds for a stop to take effect: a system call comes to its end before."""
_STOPPED_STATES = "TtZXx"


def stop_and_kill(pid: int, *, descendants_too: bool) -> None:
    """Kill a process; with ``descendants_too``, all processes below it first.

    They are stopped before they are killed. A stopped process forks no more, and its children stay below it: therefore
    each round finds fewer new ones, and a fork bomb that is limited in number ends.
    """
    root = read_process(pid)
    if root is None:
        return
    if descendants_too:
        _stop([root])
        stopped: set[tuple[int, int]] = set()
        for _ in range(_MAX_ROUNDS):
            new = {(each.pid, each.start_ticks): each for each in descendants(pid)}
            if not new.keys() - stopped:
                break
            _stop(each for key, each in new.items() if key not in stopped)
            stopped |= new.keys()
        send_signal(descendants(pid), signal.SIGKILL)
    send_signal([root], signal.SIGKILL)


def kill_descendants(*, limit_s: float) -> bool:
    """Kill and reap all descendants of this process, which adopts orphans; False where some are left.

    bubblewrap that is killed while it starts leaves a child that no death signal reaches: that child is found here. The
    first process of a sandbox ends only when all others in it are reaped, and those that entered are our children.
    """
    deadline = time.monotonic() + limit_s
    while found := descendants(os.getpid()):
        if time.monotonic() > deadline:
            return False
        send_signal(found, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.005)
    return True


def children() -> set[int]:
    """Return the pids of this process's own children; it must have one thread."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as stream:
            return {int(pid) for pid in stream.read().split()}
    except FileNotFoundError:  # the kernel was built without it
        own = os.getpid()
        return {each.pid for each in descendants(own) if each.ppid == own}


def _stop(processes: Iterable[Process]) -> None:
    """Stop processes, and wait until each has come to rest: before that it may still finish a fork."""
    found = list(processes)
    send_signal(found, signal.SIGSTOP)
    deadline = time.monotonic() + _STOP_S
    for each in found:
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                now = read_process(each.pid)
                if now is None or now.start_ticks != each.start_ticks or now.state in _STOPPED_STATES:
                    break
            time.sleep(0.001)
