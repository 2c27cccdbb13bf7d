"""The interface of sandboxes, which every backend and the client of the daemon implement.

A sandbox holds one work tree and runs programs in it. Programs inside can change the work tree, ``/tmp`` and
``/dev/shm``, and nothing else. A sandbox has no time limit of its own: it lives until `Sandbox.kill`, or until the
process that started it ends.

Paths of files are relative to the work tree, or absolute inside the sandbox. They are text in the file system's
encoding with ``surrogateescape``, as in `os.fsdecode`, so that every name that a program can make has a text.

::

    HpcrlError
    └── SandboxError            the sandbox failed, not the program in it; a rollout must get no reward for this
        ├── SandboxStartError   it could not be started; the message says why and what to do
        ├── SandboxLostError    it has ended, or its daemon has
        ├── SandboxLimitError   files are larger than allowed: programs in the sandbox caused it
        └── SandboxEvictedError it was ended, because all sandboxes of the node together used too much memory
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from hpcrl.errors import HpcrlError

MIB = 1 << 20
DEFAULT_MAX_OUTPUT_BYTES = 64 << 10
DEFAULT_MAX_GET_BYTES = 16 * MIB
DEFAULT_MAX_DIFF_BYTES = 64 * MIB
DEFAULT_WORK_DIRECTORY = "/work"
MAX_TEXT_DIFF_LINES = 5_000
"""Maximum lines of a file that a patch shows as text: the time of a comparison grows with their square."""

KilledBy = Literal["timeout", "output", "memory", "cpu"]
"""Limit that ended a program.

``timeout``: it ran longer than `Sandbox.exec` allows. ``output``: it wrote more than `SandboxLimits.output_bytes`.
``memory``: the kernel or the watcher ended one of its processes, because the sandbox used more than
`SandboxLimits.memory_bytes`. ``cpu``: a process used more than `SandboxLimits.cpu_s`.
"""


class SandboxError(HpcrlError):
    """A sandbox failed, and not the program in it. A rollout must get no reward for this."""


class SandboxStartError(SandboxError):
    """A sandbox could not be started; the message says why, with a hint."""


class SandboxLostError(SandboxError):
    """A sandbox has ended, or its daemon has."""


class SandboxLimitError(SandboxError):
    """Files of a sandbox are larger than allowed. Programs in it caused this, and not the node."""


class SandboxEvictedError(SandboxError):
    """A sandbox was ended because all sandboxes of the node together used more memory than they may.

    It was the largest one, and may have been within its own limit. No other sandbox is lost, nor is the daemon.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Limits of one sandbox. `hpcrl env sandbox` tells how each one holds on a node.

    Attributes
    ----------
    memory_bytes:
        Memory of all processes together. Files in the work tree, ``/tmp`` and ``/dev/shm`` are in memory too.
    processes:
        Processes and threads at once.
    disk_bytes, inodes:
        Bytes and number of files in the work tree. Bytes of ``/tmp`` are limited to ``scratch_bytes``.
    scratch_bytes:
        Bytes of ``/tmp``.
    shm_bytes:
        Bytes of ``/dev/shm``.
    open_files:
        Open files of one process.
    file_bytes:
        Bytes of one file.
    cpu_s:
        CPU seconds of one process.
    output_bytes:
        Bytes that one program may write to its output before it is killed. `Sandbox.exec` keeps fewer.
    network:
        ``none`` is an empty network namespace. ``host`` is the node's network, without any limit.
    """

    memory_bytes: int = 1024 * MIB
    processes: int = 128
    disk_bytes: int = 256 * MIB
    inodes: int = 50_000
    scratch_bytes: int = 64 * MIB
    shm_bytes: int = 16 * MIB
    open_files: int = 512
    file_bytes: int = 256 * MIB
    cpu_s: float = 3600.0
    output_bytes: int = 256 * MIB
    network: Literal["none", "host"] = "none"


@dataclass(frozen=True, slots=True)
class ExecResult:
    """Outcome of one program.

    Attributes
    ----------
    rc:
        Exit code; ``-signal`` where a signal ended it.
    out:
        Standard output and standard error in the order they were written. Where there was more than ``max_output``
        bytes, the first half and the last half of that size.
    truncated:
        True where bytes are missing in the middle of ``out``.
    killed_by:
        Limit that ended the program, or one of its processes; None where it ended by itself.
    wall_s:
        Seconds from its start to its end.
    out_bytes:
        Bytes that it wrote altogether.
    """

    rc: int
    out: bytes
    truncated: bool = False
    killed_by: KilledBy | None = None
    wall_s: float = 0.0
    out_bytes: int = 0

    @property
    def text(self) -> str:
        """Return the output as text; bytes that are not UTF-8 are replaced."""
        return self.out.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class SandboxFile:
    """One file of a sandbox.

    Attributes
    ----------
    content:
        Bytes of a regular file; the target of a symbolic link.
    executable:
        It has the executable bits.
    link:
        It is a symbolic link.
    """

    content: bytes
    executable: bool = False
    link: bool = False


@dataclass(frozen=True, slots=True)
class PatchEntry:
    """Change of one path between a base tree and the work tree.

    Attributes
    ----------
    path:
        Relative to the work tree.
    before, after:
        Files of the base and of the work tree; None where there is none.
    """

    path: str
    before: SandboxFile | None
    after: SandboxFile | None


@dataclass(frozen=True, slots=True)
class Patch:
    """Changes of a work tree against its base, ordered by path: exact for every name and every content.

    A patch is applied by `Sandbox.apply`, which needs no context and cannot fail in parts.
    """

    entries: tuple[PatchEntry, ...] = ()

    def select(self, keep: Callable[[str], bool]) -> Patch:
        """Return the changes of those paths for which ``keep`` is true."""
        return Patch(tuple(entry for entry in self.entries if keep(entry.path)))

    @property
    def paths(self) -> tuple[str, ...]:
        """Changed paths."""
        return tuple(entry.path for entry in self.entries)

    def text(self) -> str:
        """Return a unified diff for people; binary and very long files are named without their lines."""
        return "".join(_entry_text(entry) for entry in self.entries)


class Sandbox(Protocol):
    """One sandbox. Methods raise `SandboxLostError` once it has ended."""

    @property
    def id(self) -> str:
        """Name of the sandbox, unique on its node."""

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_s: float = 60.0,
        max_output: int = DEFAULT_MAX_OUTPUT_BYTES,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> ExecResult:
        """Run a program until it ends, and return its outcome.

        A program that cannot be found or executed has the exit code 127 or 126, as in a shell. After a timeout, all
        processes that it has started are ended. Otherwise processes that it leaves in the background live on, until
        the sandbox ends; they do not delay the return.

        Parameters
        ----------
        argv:
            Program and arguments; no shell reads them.
        stdin:
            Its standard input.
        timeout_s:
            Maximum wall-clock seconds.
        max_output:
            Maximum bytes of output that are returned. What is more is read and dropped.
        cwd:
            Working directory; the work tree by default.
        env:
            Variables, added to ``PATH``, ``HOME``, ``LANG`` and those given to `SandboxHost.start`.
        """

    async def put(self, files: Mapping[str, bytes | SandboxFile]) -> None:
        """Write files, with the directories above them. What is at a path is replaced, also where it is a link.

        Raises
        ------
        SandboxLimitError
            The work tree has no space for them.
        SandboxError
            A file cannot be written where it should be.
        """

    async def get(self, paths: Sequence[str], *, max_bytes: int = DEFAULT_MAX_GET_BYTES) -> dict[str, bytes]:
        """Return the contents of regular files; paths without one are left out. Links are followed inside only.

        Raises
        ------
        SandboxLimitError
            The files have more than ``max_bytes`` bytes together.
        """

    async def diff(self, base: str, *, max_bytes: int = DEFAULT_MAX_DIFF_BYTES) -> Patch:
        """Return the changes of the work tree against a tree of the host (`SandboxHost.add_tree`, `snapshot`).

        Raises
        ------
        SandboxLimitError
            New and changed files have more than ``max_bytes`` bytes together.
        """

    async def apply(self, patch: Patch) -> None:
        """Make the changes of a patch in the work tree: write what is after, and remove what is no longer."""

    async def snapshot(self) -> str:
        """Keep a copy of the work tree, and return its name for `SandboxHost.start` and `diff`."""

    async def kill(self) -> None:
        """End the sandbox and all of its processes. A second call has no effect."""


class SandboxHost(Protocol):
    """Starts sandboxes on one node and keeps the trees that they start from."""

    async def add_tree(self, source: Path | Mapping[str, bytes | SandboxFile]) -> str:
        """Keep a copy of a directory or of files, and return its name. Equal trees have equal names.

        Sandboxes get a copy of their own: no sandbox can change a tree, or the directory that it came from.

        Raises
        ------
        SandboxError
            The directory cannot be read.
        """

    async def drop_tree(self, tree: str) -> None:
        """Give up a tree: it is removed when it was dropped as often as it was added. Sandboxes keep their copies."""

    async def describe(self) -> dict[str, str]:
        """Return by what limits hold here.

        Keys are ``memory``, ``processes`` and ``uid`` (a user id on the node). Where all sandboxes of the node have a
        limit together, ``node_memory`` says how it holds, and ``evicted`` how many sandboxes were ended for it.
        """

    async def start(
        self,
        *,
        image: str | None = None,
        tree: str | None = None,
        limits: SandboxLimits | None = None,
        work_directory: str = DEFAULT_WORK_DIRECTORY,
        mounts: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Sandbox:
        """Start a sandbox.

        Parameters
        ----------
        image:
            Root filesystem, read-only: for bubblewrap a directory, for Apptainer a SIF or squashfs file, for Docker
            and Podman a name that is on the node already. Without it, the node's own ``/usr``.
        tree:
            Tree whose copy is the work tree at first; an empty one without it.
        limits:
            The defaults of `SandboxLimits` without it.
        work_directory:
            Absolute path of the work tree inside.
        mounts:
            Directories of the node that programs may read, by their absolute path inside.
        env:
            Variables of all programs.

        Raises
        ------
        SandboxStartError
            It does not start, or a container finds no room within the limit of the node; nothing is left of it.
        """


def _entry_text(entry: PatchEntry) -> str:
    before, after = entry.before, entry.after
    names = (f"a/{entry.path}" if before else "/dev/null", f"b/{entry.path}" if after else "/dev/null")
    head = f"diff --git a/{entry.path} b/{entry.path}\n"
    if after is None:
        head += f"deleted file mode {_mode(before)}\n"
    elif before is None:
        head += f"new file mode {_mode(after)}\n"
    elif _mode(before) != _mode(after):
        head += f"old mode {_mode(before)}\nnew mode {_mode(after)}\n"
    texts = [_lines(file) for file in (before, after)]
    old, new = texts
    if old is None or new is None:
        return f"{head}Binary files {names[0]} and {names[1]} differ\n"
    lines = [
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
        for line in difflib.unified_diff(old, new, *names)
    ]
    return head + "".join(lines)


def _mode(file: SandboxFile | None) -> str:
    if file is None or not (file.link or file.executable):
        return "100644"
    return "120000" if file.link else "100755"


def _lines(file: SandboxFile | None) -> list[str] | None:
    """Lines of a text file with their ends; None for one that is not shown."""
    if file is None:
        return []
    if b"\0" in file.content or file.content.count(b"\n") > MAX_TEXT_DIFF_LINES:
        return None
    try:
        text = file.content.decode()
    except UnicodeDecodeError:
        return None
    return [f"{line}\n" for line in text.split("\n")[:-1]] + ([text.split("\n")[-1]] if text.split("\n")[-1] else [])
