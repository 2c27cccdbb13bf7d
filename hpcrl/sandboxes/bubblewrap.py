"""The command line of bubblewrap for a sandbox. Pure functions, but for the look at the node's root directory."""

from __future__ import annotations

import os
import posixpath
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from hpcrl.sandboxes.interface import SandboxLimits, SandboxStartError

MINIMUM_VERSION = (0, 8)
"""First version with ``--disable-userns`` and ``--size``."""
INSIDE_UID = 1000
"""User and group inside; what it is on the node is another number."""

_FIRST_FD = 3
ETC = {
    "passwd": (
        f"agent:x:{INSIDE_UID}:{INSIDE_UID}:agent:/tmp:/bin/sh\nnobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n"
    ),
    "group": f"agent:x:{INSIDE_UID}:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
_LINKED = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
"""Directories of the root that are links into ``/usr`` on most systems."""
_ETC_BOUND = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "mime.types")
_ETC_NETWORK = ("resolv.conf", "ssl", "ca-certificates", "pki", "services", "protocols")
_OWN = ("proc", "dev", "tmp", "sys", "run", "boot", "mnt", "media", "home", "root", "lost+found")
"""Directories of an image's root that a sandbox does not take from it."""
_INIT = "/.init"


@dataclass(frozen=True, slots=True)
class BubblewrapCommand:
    """A command line and the files that it expects.

    Attributes
    ----------
    argv:
        Program and arguments. Its standard output gets one byte when the sandbox is set up.
    numbers:
        File descriptors by what is expected there: ``info`` (a pipe, to be written), ``seccomp``, ``init`` and those
        of `contents` (to be read).
    contents:
        Contents of small files in ``/etc``.
    """

    argv: tuple[str, ...]
    numbers: Mapping[str, int]
    contents: Mapping[str, str]


def bubblewrap_command(
    program: str,
    *,
    limits: SandboxLimits,
    work_directory: str,
    image: str | None = None,
    mounts: Mapping[str, str] | None = None,
) -> BubblewrapCommand:
    """Return the command line of a sandbox.

    It is started with an empty environment and without limits on processes (those of its user namespace would count
    what the user runs outside, too): each program gets its limits when it enters.
    """
    contents = {} if image else ETC
    numbers = {name: _FIRST_FD + n for n, name in enumerate(("info", "seccomp", "init", *contents))}
    argv = [program, "--unshare-user", "--disable-userns", "--unshare-pid", "--unshare-ipc", "--unshare-uts"]
    argv += [] if limits.network == "host" else ["--unshare-net"]
    argv += ["--unshare-cgroup-try", "--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL"]
    argv += ["--uid", str(INSIDE_UID), "--gid", str(INSIDE_UID), "--hostname", "sandbox", "--clearenv"]
    argv += ["--info-fd", str(numbers["info"]), "--seccomp", str(numbers["seccomp"])]
    argv += _image_root(image) if image else _node_root()
    for name in contents:
        argv += ["--perms", "0444", "--file", str(numbers[name]), f"/etc/{name}"]
    if limits.network == "host":
        argv += [word for name in _ETC_NETWORK for word in ("--ro-bind-try", f"/etc/{name}", f"/etc/{name}")]
    argv += ["--perms", "0555", "--file", str(numbers["init"]), _INIT, "--proc", "/proc", "--dev", "/dev"]
    for path, size in tmpfs_sizes(limits, work_directory).items():
        argv += ["--size", str(size), "--tmpfs", path]
    for inside, outside in sorted((mounts or {}).items()):
        argv += ["--ro-bind", outside, inside]
    # the tmpfs of /dev and / have half of the node's memory as their size
    argv += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/", "--", _INIT]
    return BubblewrapCommand(tuple(argv), numbers, contents)


def tmpfs_sizes(limits: SandboxLimits, work_directory: str) -> dict[str, int]:
    """Return the bytes of the directories that programs may write to."""
    return {"/dev/shm": limits.shm_bytes, "/tmp": limits.scratch_bytes, work_directory: limits.disk_bytes}


def tmpfs_options(limits: SandboxLimits, work_directory: str) -> dict[str, str]:
    """Return options that bubblewrap cannot set, by directory: without them a tmpfs has millions of empty files."""
    return dict.fromkeys(tmpfs_sizes(limits, work_directory), f"nr_inodes={limits.inodes}")


def resource_limits(limits: SandboxLimits) -> dict[str, int]:
    """Return the resource limits of a program, by the ends of their names."""
    return {
        "CPU": max(1, round(limits.cpu_s)),
        "NOFILE": limits.open_files,
        "FSIZE": limits.file_bytes,
        # the first process counts, too
        "NPROC": limits.processes + 1,
        "CORE": 0,
        "MEMLOCK": 64 << 10,
        "MSGQUEUE": 64 << 10,
    }


def check_paths(work_directory: str, mounts: Mapping[str, str]) -> None:
    """Refuse directories that would hide each other, or that are none.

    Raises
    ------
    SandboxStartError
        The message names the directory.
    """
    taken = ["/proc", "/dev", "/tmp", "/usr", "/etc", work_directory]
    if posixpath.normpath(work_directory) != work_directory or not work_directory.startswith("/"):
        raise SandboxStartError(f"work_directory {work_directory!r} is not an absolute path without dots")
    if any(_within(work_directory, other) for other in ("/", *taken[:-1])):
        raise SandboxStartError(
            f"work_directory {work_directory!r} is part of the sandbox's own directories\n    hint: /work or /testbed"
        )
    for inside, outside in mounts.items():
        if posixpath.normpath(inside) != inside or any(_overlap(inside, other) for other in taken):
            raise SandboxStartError(
                f"the mount {inside!r} is not an absolute path, or overlaps one of {', '.join(taken)}"
            )
        if not os.path.isdir(outside):
            raise SandboxStartError(f"{outside}: no such directory; it is to be mounted at {inside}")


def _within(path: str, directory: str) -> bool:
    if directory == "/":
        return path == "/"
    return path == directory or path.startswith(f"{directory}/")


def _overlap(one: str, other: str) -> bool:
    return not one.startswith("/") or one == "/" or _within(one, other) or _within(other, one)


def find_bubblewrap() -> str:
    """Return the path of a bubblewrap that is new enough.

    Raises
    ------
    SandboxStartError
        There is none.
    """
    hint = "\n    hint: install the package `bubblewrap`, 0.8 or newer"
    program = shutil.which("bwrap", path=f"{os.environ.get('PATH', os.defpath)}:/usr/bin:/usr/local/bin")
    if program is None:
        raise SandboxStartError(f"sandboxes need bubblewrap, and no `bwrap` is on the path{hint}")
    try:
        shown = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxStartError(f"{program} does not run: {error}{hint}") from None
    found = re.search(r"(\d+)\.(\d+)", shown)
    if found is None or (int(found[1]), int(found[2])) < MINIMUM_VERSION:
        raise SandboxStartError(f"{program} is version {shown.strip() or 'unknown'}, which is too old{hint}")
    return program


def _node_root() -> list[str]:
    """Return arguments for the node's own programs and libraries, and for nothing else of the node."""
    argv = ["--ro-bind", "/usr", "/usr"]
    for name in _LINKED:
        path = f"/{name}"
        if os.path.islink(path):
            argv += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            argv += ["--ro-bind", path, path]
    argv += ["--dir", "/etc", "--dir", "/var", "--symlink", "/tmp", "/var/tmp"]
    return argv + [word for name in _ETC_BOUND for word in ("--ro-bind-try", f"/etc/{name}", f"/etc/{name}")]


def _image_root(image: str) -> list[str]:
    """Return arguments for a directory with a root filesystem."""
    if not os.path.isdir(image):
        raise SandboxStartError(
            f"the image {image} is not a directory\n    hint: bubblewrap needs an unpacked root filesystem"
        )
    argv = []
    for name in sorted(os.listdir(image)):
        path = os.path.join(image, name)
        if name in _OWN:
            continue
        if os.path.islink(path):
            argv += ["--symlink", os.readlink(path), f"/{name}"]
        elif os.path.isdir(path):
            argv += ["--ro-bind", path, f"/{name}"]
    return argv
