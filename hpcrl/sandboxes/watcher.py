"""Looks at the memory of sandboxes, and ends what uses too much.

Where no control group limits a sandbox, it measures all of its processes. Where one does, it measures the groups, for
the sum of all sandboxes of the node (`hpcrl.sandboxes.node_memory`).

A sandbox's memory is what its processes do not share with files (``Pss`` less shared memory) and the files in its
tmpfs. Calls that take memory which shows in neither are refused there (`hpcrl.sandboxes.seccomp`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping

from hpcrl.sandboxes.bubblewrap import tmpfs_sizes
from hpcrl.sandboxes.bubblewrap_sandbox import BubblewrapSandbox
from hpcrl.sandboxes.cgroups import CgroupTree
from hpcrl.sandboxes.interface import SandboxLimits
from hpcrl.sandboxes.node_memory import NodeMemory

INTERVAL_S = 0.25
"""Seconds between two looks: a program can exceed its limit for as long."""
_PAGE = os.sysconf("SC_PAGE_SIZE")
_log = logging.getLogger(__name__)


async def watch_memory(sandboxes: Mapping[str, BubblewrapSandbox], node_memory: NodeMemory | None = None) -> None:
    """Look at sandboxes until cancelled; end the programs of each that uses more than its limit.

    Parameters
    ----------
    node_memory:
        Limit of all sandboxes of the node together; above it the largest ones end as a whole.
    """

    async def look() -> None:
        looked_at = {name: (each.pidfd, each.limits, each.work_directory) for name, each in sandboxes.items()}
        near = (lambda used: False) if node_memory is None else node_memory.is_near
        used = await asyncio.to_thread(_used, looked_at, near) if looked_at else {}
        over = {name for name, size in used.items() if size > looked_at[name][1].memory_bytes}
        for name in over & sandboxes.keys():
            await sandboxes[name].end_programs()
        if node_memory is not None:
            # programs above their own limit have just ended, so that they must not end another sandbox
            within = {name: size for name, size in used.items() if name not in over}
            _evict(sandboxes, node_memory, within)

    await _repeat(look)


async def watch_groups(
    sandboxes: Mapping[str, BubblewrapSandbox], node_memory: NodeMemory, cgroups: CgroupTree
) -> None:
    """Look at the control groups of sandboxes until cancelled, and end the largest ones above the limit of the node.

    The kernel limits the sum of this daemon as well. It ends the largest process, and no files in memory.
    """

    async def look() -> None:
        whole = cgroups.used()
        if node_memory.is_near(whole):
            groups = {name: each.cgroup for name, each in sandboxes.items() if each.cgroup is not None}
            _evict(sandboxes, node_memory, {name: group.used() for name, group in groups.items()})
        else:
            node_memory.publish(whole, whole)

    await _repeat(look)


async def _repeat(look: Callable[[], Awaitable[None]]) -> None:
    """Look until cancelled; a look that fails is reported and does not end the others."""
    fails = False
    while True:
        await asyncio.sleep(INTERVAL_S)
        try:
            await look()
            fails = False
        except Exception:  # noqa: BLE001 - without looks no sandbox has a limit any more
            if not fails:
                _log.exception("the memory of sandboxes could not be measured; the next look follows")
            fails = True


def _evict(sandboxes: Mapping[str, BubblewrapSandbox], node_memory: NodeMemory, used: Mapping[str, int]) -> None:
    """End the largest sandboxes above the limit of the node; those that are ending already do not count."""
    for name in node_memory.choose({name: size for name, size in used.items() if _lives(sandboxes, name)}):
        sandboxes[name].evict()


def _lives(sandboxes: Mapping[str, BubblewrapSandbox], name: str) -> bool:
    return name in sandboxes and sandboxes[name].lives


def _used(looked_at: Mapping[str, tuple[int, SandboxLimits, str]], near: Callable[[int], bool]) -> dict[str, int]:
    """Return bytes that sandboxes use, by name; an upper bound where that is within all limits.

    Parameters
    ----------
    near:
        Return whether the sum has to be measured exactly, by an upper bound of it.
    """
    firsts: dict[str, int] = {}
    spaces: dict[int, str] = {}
    for name, (pidfd, _, _) in looked_at.items():
        with contextlib.suppress(OSError, ValueError):  # it has ended, or ends meanwhile
            firsts[name] = _pid_of(pidfd)
            spaces[os.stat(f"/proc/{firsts[name]}/ns/pid").st_ino] = name
    processes: dict[str, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with contextlib.suppress(OSError):
                if owner := spaces.get(os.stat(f"/proc/{entry}/ns/pid").st_ino):
                    processes.setdefault(owner, []).append(int(entry))
    # resident memory is never less than what counts, and a hundred times cheaper to read
    directories = {name: tmpfs_sizes(looked_at[name][1], looked_at[name][2]) for name in processes}
    used = {name: _resident(pids) + _file_bytes(firsts[name], directories[name]) for name, pids in processes.items()}
    closely = near(sum(used.values()))
    for name, pids in processes.items():
        if closely or used[name] > looked_at[name][1].memory_bytes:
            used[name] = sandbox_memory(firsts[name], pids, directories[name])
    return used


def sandbox_memory(first: int, pids: Iterable[int], directories: Iterable[str]) -> int:
    """Return the bytes that a sandbox uses.

    Parameters
    ----------
    first:
        Pid of its first process.
    pids:
        Pids of all of its processes.
    directories:
        Its writable directories.
    """
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as stream:
            sizes = dict(re.findall(r"^(\w+): +(\d+) kB$", stream.read(), re.MULTILINE))
            total += 1024 * (int(sizes["Pss"]) - int(sizes.get("Pss_Shmem", 0)))
    return total + _file_bytes(first, directories)


def _file_bytes(first: int, directories: Iterable[str]) -> int:
    """Return the bytes of files in writable directories."""
    total = 0
    for directory in directories:
        with contextlib.suppress(OSError):
            usage = os.statvfs(f"/proc/{first}/root{directory}")
            total += (usage.f_blocks - usage.f_bfree) * usage.f_frsize
    return total


def _resident(pids: Iterable[int]) -> int:
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/statm", encoding="ascii") as stream:
            total += int(stream.read().split()[1]) * _PAGE
    return total


def _pid_of(pidfd: int) -> int:
    with open(f"/proc/self/fdinfo/{pidfd}", encoding="ascii") as stream:
        found = re.search(r"^Pid:\s+(\d+)$", stream.read(), re.MULTILINE)
    if found is None or int(found[1]) <= 0:
        raise ValueError("the process has ended")
    return int(found[1])
