"""Limits the memory of sandboxes where no control group does: looks at all of their processes, and ends them.

A sandbox's memory is what its processes do not share with files (``Pss`` less shared memory) and the files in its
tmpfs. Calls that take memory which shows in neither are refused there (`hpcrl.sandboxes.seccomp`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Iterable, Mapping

from hpcrl.sandboxes.bubblewrap import tmpfs_sizes
from hpcrl.sandboxes.bubblewrap_sandbox import BubblewrapSandbox
from hpcrl.sandboxes.interface import SandboxLimits

INTERVAL_S = 0.25
"""Seconds between two looks: a program can exceed its limit for as long."""
_PAGE = os.sysconf("SC_PAGE_SIZE")


async def watch_memory(sandboxes: Mapping[str, BubblewrapSandbox]) -> None:
    """Look at sandboxes until cancelled; end the programs of each that uses more than its limit."""
    while True:
        await asyncio.sleep(INTERVAL_S)
        if not sandboxes:
            continue
        looked_at = {name: (each.pidfd, each.limits, each.work_directory) for name, each in sandboxes.items()}
        over = await asyncio.to_thread(_over, looked_at)
        for name in over:
            if name in sandboxes:
                await sandboxes[name].end_programs()


def _over(looked_at: Mapping[str, tuple[int, SandboxLimits, str]]) -> list[str]:
    """Return the sandboxes that use too much."""
    firsts = {}
    for name, (pidfd, _, _) in looked_at.items():
        with contextlib.suppress(OSError, ValueError):
            firsts[name] = _pid_of(pidfd)
    spaces = {os.stat(f"/proc/{pid}/ns/pid").st_ino: name for name, pid in firsts.items() if _exists(pid)}
    processes: dict[str, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with contextlib.suppress(OSError):
                if owner := spaces.get(os.stat(f"/proc/{entry}/ns/pid").st_ino):
                    processes.setdefault(owner, []).append(int(entry))
    found = []
    for name, pids in processes.items():
        _, limits, work = looked_at[name]
        directories = tmpfs_sizes(limits, work)
        # resident memory is never less than what counts, and a hundred times cheaper to read
        if _resident(pids) + sum(directories.values()) > limits.memory_bytes and (
            sandbox_memory(firsts[name], pids, directories) > limits.memory_bytes
        ):
            found.append(name)
    return found


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


def _exists(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}/ns/pid")


def _pid_of(pidfd: int) -> int:
    with open(f"/proc/self/fdinfo/{pidfd}", encoding="ascii") as stream:
        found = re.search(r"^Pid:\s+(\d+)$", stream.read(), re.MULTILINE)
    if found is None or int(found[1]) <= 0:
        raise ValueError("the process has ended")
    return int(found[1])
