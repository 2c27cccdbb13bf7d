"""Control groups of sandboxes: memory and processes of one sandbox in sum.

Version 2 is used where a delegated directory has its controllers, else version 1 where it can be written, which is for
root alone. Where there is neither, `hpcrl.sandboxes.watcher` limits memory, and the kernel's count for each user
namespace limits processes.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from hpcrl.processes.left_groups import (
    CGROUP_ROOT,
    group_name,
    own_v1,
    own_v2,
    remove_group,
    remove_group_soon,
    remove_left,
)
from hpcrl.sandboxes.interface import SandboxLimits

_V2_LIMITS = ("memory.max", "memory.swap.max")
_V1_LIMITS = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
_LAST_BYTES = 1 << 20
"""A group that the kernel finds no memory in is at most so far below its limit."""
_OVERHEAD_PROCESSES = 3
"""Processes of hpcrl in the group of a sandbox: bubblewrap, the first process, and one that enters."""


@dataclass(frozen=True, slots=True)
class SandboxCgroup:
    """Groups of one sandbox; one directory in version 2, one a controller in version 1."""

    version: int
    directories: tuple[Path, ...]

    @property
    def joins(self) -> tuple[str, ...]:
        """Files that a process writes 0 to, to enter."""
        return tuple(str(directory / "cgroup.procs") for directory in self.directories)

    def oom_kills(self) -> int:
        """Return how many processes the kernel has ended because of the memory limit."""
        for directory in self.directories:
            for name in ("memory.events", "memory.oom_control"):
                with contextlib.suppress(OSError):
                    found = re.search(r"^oom_kill (\d+)$", (directory / name).read_text(), re.MULTILINE)
                    if found:
                        return int(found[1])
        return 0

    def reached_limit(self) -> bool:
        """Return whether the group has once used all memory of its own limit; that of the daemon's group is another."""
        directory = self.directories[0]
        if self.version == 2:
            return _numbers(directory / "memory.events").get("oom", 0) > 0
        # memory.failcnt stays 0 in some kernels
        most = max(_number(directory / f"memory.{kind}max_usage_in_bytes") for kind in ("", "memsw."))
        return most + _LAST_BYTES > _number(directory / _V1_LIMITS[0])

    def used(self) -> int:
        """Return the bytes of memory in use, see `memory_used`."""
        return memory_used(self.version, self.directories[0])

    def remove(self) -> bool:
        """Remove the groups, which have no processes any more; False where the kernel still refuses."""
        for directory in self.directories:
            try:
                directory.rmdir()
            except FileNotFoundError:
                continue
            except OSError:
                return False
        return True


@dataclass(frozen=True, slots=True)
class CgroupTree:
    """Groups of one daemon.

    Attributes
    ----------
    version:
        1 or 2.
    directories:
        Directories of the daemon's groups: one in version 2, those of ``memory`` and ``pids`` in version 1.
    """

    version: int
    directories: tuple[Path, ...]

    def make(self, name: str, limits: SandboxLimits) -> SandboxCgroup:
        """Make the groups of a sandbox and set its limits (OSError where that is refused)."""
        made = SandboxCgroup(self.version, tuple(directory / name for directory in self.directories))
        processes = str(limits.processes + _OVERHEAD_PROCESSES)
        for directory in made.directories:
            directory.mkdir(exist_ok=True)
        memory, pids = made.directories[0], made.directories[-1]
        (pids / "pids.max").write_text(processes)
        _limit_memory(self.version, memory, limits.memory_bytes)
        return made

    def used(self) -> int:
        """Return the bytes of memory that all sandboxes use, see `memory_used`."""
        return memory_used(self.version, self.directories[0])

    def remove(self) -> None:
        """Remove all groups; those that still have processes after some seconds are left for the next daemon."""
        for directory in self.directories:
            remove_group_soon(directory)


def find_cgroups(
    pid: int, *, root: Path = CGROUP_ROOT, delegated: Path | None = None, memory_bytes: int | None = None
) -> tuple[CgroupTree | None, str]:
    """Make the groups of a daemon with a pid, and return them with a sentence about how they were found.

    The process must have one thread: it forks. Groups that daemons left which have ended are removed.

    Parameters
    ----------
    root:
        Directory on which control groups are mounted.
    delegated:
        A directory of version 2 that the user may write to and in which no process is.
    memory_bytes:
        Limit of all sandboxes together; None: only each one has a limit.
    """
    name = group_name(pid)
    reasons = []
    for version, places in ((2, [delegated] if delegated else [own_v2(root)]), (1, own_v1(root))):
        if not places or None in places:
            reasons.append(f"cgroup v{version}: not mounted")
            continue
        made: list[Path] = []
        try:
            for place in places:
                assert place is not None
                remove_left(place)
                if version == 2:
                    _enable(place)
                directory = place / name
                directory.mkdir()
                made.append(directory)
                if version == 2:
                    _enable(directory)
            tree = CgroupTree(version, tuple(made))
            if memory_bytes is not None:
                _limit_memory(version, made[0], memory_bytes)
            trial = tree.make("trial", SandboxLimits())
            _try_to_join(trial)
            trial.remove()
        except OSError as error:
            reasons.append(f"cgroup v{version}: {error.strerror or error}")
            for directory in made:
                remove_group(directory)
            continue
        return tree, f"cgroup v{version}"
    return None, "; ".join(reasons)


def memory_used(version: int, directory: Path) -> int:
    """Return the bytes that a group uses, without pages of files on disk, which the kernel can give up at any time."""
    current, prefix = ("memory.current", "") if version == 2 else ("memory.usage_in_bytes", "total_")
    found = _numbers(directory / "memory.stat")
    pages = sum(found.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
    return max(0, _number(directory / current) - pages)


def _limit_memory(version: int, directory: Path, memory_bytes: int) -> None:
    limit, swap = _V2_LIMITS if version == 2 else _V1_LIMITS
    (directory / limit).write_text(str(memory_bytes))
    with contextlib.suppress(OSError):  # a kernel that does not count swap
        (directory / swap).write_text("0" if version == 2 else str(memory_bytes))


def _number(path: Path) -> int:
    """Return the number in a file of a group; 0 where there is none, or no group any more."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


def _numbers(path: Path) -> dict[str, int]:
    """Return the numbers of a file of a group by name; nothing where there is none."""
    try:
        text = path.read_text()
    except OSError:
        return {}
    return {name: int(value) for name, value in re.findall(r"^(\w+) (\d+)$", text, re.MULTILINE)}


def _try_to_join(group: SandboxCgroup) -> None:
    """Let a child enter a group (OSError where that is refused, as between subtrees of different owners)."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for path in group.joins:
                with open(path, "w", encoding="ascii") as stream:
                    stream.write("0")
            code = 0
        except OSError as error:
            code = error.errno or 1
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code:
        raise OSError(code, f"a process may not enter: {os.strerror(code)}")


def _enable(directory: Path) -> None:
    """Let groups below have limits of memory and processes."""
    if {"memory", "pids"} <= set((directory / "cgroup.subtree_control").read_text().split()):
        return
    (directory / "cgroup.subtree_control").write_text("+memory +pids")
