"""Entering the namespaces of a sandbox, and giving up all rights, between fork and exec.

The process must have one thread. The kernel allows this to the owner of the sandbox's user namespace, which is the user
that started bubblewrap. Standard library only.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import signal
import struct
from collections.abc import Mapping, Sequence

#: flags of ``setns`` by the file below ``/proc/PID/ns``
_NAMESPACES = {
    "mnt": 0x00020000,
    "cgroup": 0x02000000,
    "uts": 0x04000000,
    "ipc": 0x08000000,
    "user": 0x10000000,
    "pid": 0x20000000,
    "net": 0x40000000,
}
_NS_GET_PARENT = 0xB702
_MS_NOSUID, _MS_NODEV, _MS_REMOUNT = 2, 4, 32
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_CAPBSET_DROP = 1, 4, 22, 24
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 36, 38, 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_SECCOMP_MODE_FILTER = 2
_CAPABILITY_VERSION_3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)
_libc.prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)


class _FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def separate_namespaces(pid: int) -> list[str]:
    """Return which namespaces of a process are not our own; OSError where it has ended."""
    return [
        name
        for name in _NAMESPACES
        if os.stat(f"/proc/{pid}/ns/{name}").st_ino != os.stat(f"/proc/self/ns/{name}").st_ino
    ]


def become_user(uid: int | None) -> None:
    """Take a user id for good, with a group of the same number and no others. None keeps the user."""
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)


def hide_from_programs() -> None:
    """Let no program of the same user look into this process or its files, until it executes a program."""
    _prctl(_PR_SET_DUMPABLE, 0)


def join_processes(pidfd: int, namespaces: Sequence[str]) -> None:
    """Enter the namespaces of a sandbox's first process. Processes that are forked from now on are in the sandbox."""
    _setns(pidfd, sum(_NAMESPACES[name] for name in namespaces))


def join_files(pidfd: int, remounts: Mapping[str, str]) -> None:
    """Enter the mount namespace of a sandbox and its user namespace, and none of the others.

    A process that does so sees the sandbox's files with the rights of its programs, and is not seen by them. Before it
    gives up the right to mount, it sets options of mounts (`remount_tmpfs`).
    """
    user = os.open(f"/proc/{_pid_of(pidfd)}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    # the mounts belong to the parent of the namespace in which programs run
    parent = fcntl.ioctl(user, _NS_GET_PARENT)
    _setns(parent, _NAMESPACES["user"])
    _setns(pidfd, _NAMESPACES["mnt"])
    for path, options in remounts.items():
        remount_tmpfs(path, options)
    _setns(user, _NAMESPACES["user"])
    os.close(user)
    os.close(parent)


def remount_tmpfs(path: str, options: str) -> None:
    """Change options of a mounted tmpfs."""
    flags = ctypes.c_ulong(_MS_REMOUNT | _MS_NOSUID | _MS_NODEV)
    _check(_libc.mount(b"tmpfs", os.fsencode(path), None, flags, options.encode()), f"remount {path}")


def drop_rights(seccomp: bytes, *, end_with_parent: bool = False) -> None:
    """Give up all capabilities and the way to get any, and install a seccomp filter; both survive ``exec``.

    Parameters
    ----------
    seccomp:
        Program of the filter (`hpcrl.sandboxes.seccomp`).
    end_with_parent:
        Let the kernel kill this process when its parent ends.
    """
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    number = 0
    prctl = _libc.prctl
    while prctl(_PR_CAPBSET_DROP, number, 0, 0, 0) == 0:
        number += 1
    header = struct.pack("<Ii", _CAPABILITY_VERSION_3, 0)
    _check(_libc.capset(header, bytes(24)), "capset")
    if end_with_parent:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        # its orphans stay below it, so that they are found when it has to be ended
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    program = _FilterProgram(len(seccomp) // 8, seccomp)
    _check(prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(program), 0, 0), "seccomp")


def set_limits(limits: Mapping[str, int]) -> None:
    """Set resource limits by their name without ``RLIMIT_``, soft and hard; lower hard limits of this process stay."""
    for name, wanted in limits.items():
        number = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(number)[1]
        value = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        # SIGXCPU comes at the soft limit, and SIGKILL a second later
        resource.setrlimit(number, (value, value + 1 if name == "CPU" and hard == resource.RLIM_INFINITY else value))


def _pid_of(pidfd: int) -> int:
    with open(f"/proc/self/fdinfo/{pidfd}") as stream:
        for line in stream:
            if line.startswith("Pid:"):
                pid = int(line.split()[1])
                if pid > 0:
                    return pid
    raise ProcessLookupError("the first process of the sandbox has ended")


def _setns(fd: int, flags: int) -> None:
    _check(_libc.setns(fd, flags), "setns")


def _prctl(option: int, value: int) -> None:
    _check(_libc.prctl(option, value, 0, 0, 0), f"prctl {option}")


def _check(returned: int, what: str) -> None:
    if returned != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
