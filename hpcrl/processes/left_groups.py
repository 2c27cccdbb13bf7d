"""Control groups of daemons of sandboxes, by name: where they are made, and what is left of a daemon that was killed.

The name of a group has the number of the daemon's pid namespace, its pid and its start time. A daemon that ends in
order removes its groups. The next one on the node, and the guard of a role, remove those of daemons that have ended
otherwise, and kill what still runs in them: bubblewrap that is killed while it starts leaves a process that no death
signal reaches. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from hpcrl.processes.procfs import is_alive, read_process, send_signal

CGROUP_ROOT = Path("/sys/fs/cgroup")
_NAME = "hpcrl-sandboxd"
_GROUP = re.compile(rf"{_NAME}-(?:(\d+)-)?(\d+)-(\d+)", re.ASCII)
"""Pid namespace, pid and start time of the daemon. Other processes of the node may be of a version that has no
namespace in its names: it reads the last two numbers."""
_REMOVE_S = 5.0
"""Longest wait in seconds for the end of the processes of a group."""
_LEFT_S = 1.0
"""Longest wait in seconds for all groups that daemons have left: roles of each kind end one after another."""


def group_name(pid: int) -> str:
    """Return the name of the groups of a daemon."""
    process = read_process(pid)
    return f"{_NAME}-{_pid_namespace()}-{pid}-{process.start_ticks if process else 0}"


def own_v2(root: Path) -> Path | None:
    """Return the group of version 2 of this process; None where that is not mounted."""
    for mount in (root, root / "unified"):
        if (mount / "cgroup.controllers").exists():
            return mount / _path_of("")
    return None


def own_v1(root: Path) -> list[Path | None]:
    """Return the groups of ``memory`` and ``pids`` of this process; None for one that is not mounted."""
    found: list[Path | None] = []
    for controller in ("memory", "pids"):
        mount = root / controller
        own = mount / _path_of(controller)
        # a container may see its own group as the root of the mount
        own = own if own.is_dir() else mount
        found.append(own if (own / "cgroup.procs").exists() else None)
    return found


def remove_left_groups(root: Path = CGROUP_ROOT) -> None:
    """Remove groups of ended daemons that had the same groups as this process; what cannot be removed stays."""
    deadline = time.monotonic() + _LEFT_S
    with contextlib.suppress(OSError):
        for place in filter(None, [own_v2(root), *own_v1(root)]):
            remove_left(place, deadline)


def remove_left(place: Path, deadline: float | None = None) -> None:
    """Remove groups of daemons that have ended, and kill what still runs in them; what cannot be removed stays.

    Nothing is killed in a group of another pid namespace, in which the daemon's number means another process.

    Parameters
    ----------
    deadline:
        Time (monotonic) at which no group is waited for any more; by default in a second.
    """
    deadline = time.monotonic() + _LEFT_S if deadline is None else deadline
    for directory in place.glob(f"{_NAME}-*"):
        found = _GROUP.fullmatch(directory.name)
        if found is None or is_alive(int(found[2]), int(found[3])):
            continue
        remove_group_soon(directory, deadline, kill=found[1] == _pid_namespace())


def remove_group_soon(directory: Path, deadline: float | None = None, *, kill: bool = False) -> None:
    """Remove a group whose processes are ending; ``kill`` ends them."""
    deadline = time.monotonic() + _REMOVE_S if deadline is None else deadline
    while not remove_group(directory) and time.monotonic() < deadline:
        if kill:
            _kill(directory)
        time.sleep(0.02)


def remove_group(directory: Path) -> bool:
    """Remove a group with those below it; return whether it is gone."""
    removed = [remove_group(below) for below in _below(directory)]
    try:
        directory.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return all(removed)


def _kill(directory: Path) -> None:
    """Kill all processes in a group and in those below it."""
    for below in _below(directory):
        _kill(below)
    found = [process for pid in _pids(directory) if (process := read_process(pid)) is not None]
    # a process that was read after the one of this number had ended is in no such group
    left = _pids(directory)
    for process in found:
        if process.pid in left:
            with contextlib.suppress(PermissionError):  # the group stays
                send_signal([process], signal.SIGKILL)


def _pids(directory: Path) -> set[int]:
    """Return the pids in a group; those of other pid namespaces are 0, and left out."""
    with contextlib.suppress(OSError, ValueError):
        return {int(pid) for pid in (directory / "cgroup.procs").read_text().split()} - {0}
    return set()


def _pid_namespace() -> str:
    return str(os.stat("/proc/self/ns/pid").st_ino)


def _path_of(controller: str) -> str:
    """Return our own group below a controller's mount; the empty name is version 2."""
    with open("/proc/self/cgroup", encoding="utf-8") as stream:
        for line in stream:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            if controller in controllers.split(","):
                return path.lstrip("/")
    return ""


def _below(directory: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        yield from [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
