"""Control groups of daemons of sandboxes, by name: where they are made, and what is left of a daemon that was killed.

The name of a group has the daemon's pid and start time. A daemon that ends in order removes its groups; the next one on
the node, and the guard of a role, remove those of daemons that have ended otherwise. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from hpcrl.processes.procfs import is_alive, read_process

CGROUP_ROOT = Path("/sys/fs/cgroup")
_NAME = "hpcrl-sandboxd"
_REMOVE_S = 5.0
"""Longest wait in seconds for the end of the processes of a group."""


def group_name(pid: int) -> str:
    """Return the name of the groups of a daemon."""
    process = read_process(pid)
    return f"{_NAME}-{pid}-{process.start_ticks if process else 0}"


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
    with contextlib.suppress(OSError):
        for place in filter(None, [own_v2(root), *own_v1(root)]):
            remove_left(place)


def remove_left(place: Path) -> None:
    """Remove groups of daemons that have ended; their processes have ended with them."""
    for directory in place.glob(f"{_NAME}-*-*"):
        _, pid, ticks = directory.name.rsplit("-", 2)
        if pid.isdecimal() and ticks.isdecimal() and not is_alive(int(pid), int(ticks)):
            remove_group_soon(directory)


def remove_group_soon(directory: Path) -> None:
    """Remove a group whose processes are ending."""
    deadline = time.monotonic() + _REMOVE_S
    while not remove_group(directory) and time.monotonic() < deadline:
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
