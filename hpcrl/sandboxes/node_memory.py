"""Limit on the memory of all sandboxes of a node together, whichever daemons have started them.

A daemon writes what its sandboxes use to a file of a directory in shared memory, which all daemons of a limit share. It
holds a lock on the file as long as it lives. Above the limit the daemon with the largest sandbox ends it as a whole.
The programs in it did nothing that is forbidden, so its calls raise
`hpcrl.sandboxes.interface.SandboxEvictedError`. A container cannot be measured from here: before it starts, it needs
room for its own limit, which Docker and the like enforce.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from hpcrl.processes.environment_marks import SANDBOX_MEMORY_VARIABLE
from hpcrl.sandboxes.interface import MIB, SandboxStartError
from hpcrl.storage.shm_directories import SHARED_MEMORY, join_owned, leave_owned

ROOM_S = 600.0
"""Maximum seconds that the start of a container waits for room."""
_LOOK_S = 0.25
_SILENT_S = 2.0
"""Seconds without a word of a daemon after which others do not wait for it, and end a sandbox of theirs."""
_MARGIN = 32
"""This part of the limit is left to the kernel, which would end the largest process and not the largest sandbox."""
_NUMBERS = "%020d %020d"
_log = logging.getLogger(__name__)


class _Use(NamedTuple):
    """Bytes that all sandboxes of a daemon use, bytes of the largest one, and the name of the daemon's file."""

    total: int
    largest: int
    daemon: str


class NodeMemory:
    """Memory of all sandboxes of a node, and its limit.

    Attributes
    ----------
    limit:
        Bytes that all sandboxes may use together.
    evicted:
        Number of sandboxes of this daemon that were ended for it.
    """

    def __init__(self, limit: int, name: str, *, base: Path = SHARED_MEMORY, room_s: float = ROOM_S) -> None:
        """Join the daemons of a limit; where that is impossible, only sandboxes of this daemon count.

        Parameters
        ----------
        name:
            Letters, digits and hyphens that the daemons of the limit have in common.
        base:
            Directory in memory that the daemons of a node have in common.
        room_s:
            Maximum seconds that the start of a container waits for room.
        """
        self.limit, self.evicted = limit, 0
        self._room_s = room_s
        self._reserved: dict[str, int] = {}
        self._path: Path | None = None
        self._missed = False
        try:
            self._directory, self._lock = join_owned(base, f"sandboxes-{name}")
            # the file has a name that others look at only when it is locked and has numbers
            staged = self._directory / f".{os.getpid()}-{os.urandom(4).hex()}"
            self._file = os.open(staged, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.pwrite(self._file, (_NUMBERS % (0, 0)).encode(), 0)  # later writes need no more memory
            self._path = staged.rename(self._directory / staged.name[1:])
        except OSError as error:
            _log.warning("sandboxes of other daemons do not count in the memory of the node: %s", error)

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> NodeMemory | None:
        """Return what the variable of the plan says, ``BYTES:NAME``; None without it."""
        limit, _, name = environ.get(SANDBOX_MEMORY_VARIABLE, "").partition(":")
        return cls(int(limit), name) if limit else None

    @property
    def reason(self) -> str:
        """Return why a sandbox is ended, for its error."""
        return f"all sandboxes of the node together used more than {self.limit / MIB:,.0f} MiB, and it was the largest"

    def describe(self, how: str) -> dict[str, str]:
        """Return what `SandboxHost.describe` says of it; ``how`` it holds, in words."""
        return {"node_memory": f"{how}, {self.limit / MIB:,.0f} MiB", "evicted": str(self.evicted)}

    def is_near(self, used: int) -> bool:
        """Return whether own sandboxes that use this number of bytes have to be measured one by one."""
        return used + sum(each.total for each in self._others()) > self.limit * 3 // 4

    def publish(self, total: int, largest: int) -> None:
        """Tell other daemons what own sandboxes use, in bytes; ``largest`` may be an upper bound."""
        if self._path is not None:
            os.pwrite(self._file, (_NUMBERS % (total, largest)).encode(), 0)

    def choose(self, used: Mapping[str, int]) -> list[str]:
        """Take what each own sandbox uses, in bytes, and return the names of those to end, the largest first."""
        others = self._others()
        total = sum(used.values()) + sum(each.total for each in others)
        own = "" if self._path is None else self._path.name
        elsewhere = max(((each.largest, each.daemon) for each in others), default=(-1, ""))
        found = []
        for name, size in sorted(used.items(), key=lambda item: -item[1]):
            if total <= self.limit - self.limit // _MARGIN or (size, own) < elsewhere:
                break
            found.append(name)
            total -= size
        kept = [size for name, size in used.items() if name not in found]
        self.publish(sum(kept), max(kept, default=0))
        return found

    async def reserve(self, name: str, size: int) -> None:
        """Wait until there is room for a container, and keep it until `give_back`.

        Parameters
        ----------
        size:
            Limit of the container in bytes.

        Raises
        ------
        SandboxStartError
            There is none within the time.
        """
        deadline = time.monotonic() + self._room_s
        while not self._reserve(name, size):
            if time.monotonic() > deadline or size > self.limit:
                raise SandboxStartError(
                    f"a container with {size / MIB:,.0f} MiB found no room within {self._room_s:g} s: all sandboxes of "
                    f"the node may have {self.limit / MIB:,.0f} MiB together\n"
                    "    hint: open fewer at once (max_sandboxes), or raise rollouts.sandboxes_gib"
                )
            await asyncio.sleep(_LOOK_S)

    def _reserve(self, name: str, size: int) -> bool:
        with self._alone():
            reserved = {**self._reserved, name: size}
            if sum(reserved.values()) + sum(each.total for each in self._others()) > self.limit:
                return False
            self._reserved = reserved
            self.publish(sum(reserved.values()), 0)
            return True

    def give_back(self, name: str) -> None:
        """Give up the room of a container."""
        self._reserved.pop(name, None)
        self.publish(sum(self._reserved.values()), 0)

    def close(self) -> None:
        """Leave the other daemons; own sandboxes do not count any more."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None
            os.close(self._file)
            leave_owned(self._directory, self._lock)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep others from reserving at the same time; the lock is held for some file operations."""
        with contextlib.ExitStack() as stack:
            if self._path is not None:
                with contextlib.suppress(FileNotFoundError):  # `_others` reports that it is missing
                    directory = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                    stack.callback(os.close, directory)
                    fcntl.flock(directory, fcntl.LOCK_EX)
            yield

    def _others(self) -> list[_Use]:
        """Return what other daemons use; files of those that have ended are removed."""
        found: list[_Use] = []
        if self._path is None:
            return found
        try:
            paths = list(self._directory.iterdir())
        except OSError as error:
            # systemd (RemoveIPC) and epilogs of jobs may empty shared memory; then the limit is for this daemon alone
            if not self._missed:
                _log.warning("sandboxes of other daemons do not count any more: %s", error)
            self._missed = True
            return found
        for path in paths:
            if path == self._path or not path.name[0].isdecimal():
                continue
            # one that has ended may be removed by another daemon at the same time
            with contextlib.suppress(OSError, ValueError), path.open("rb") as stream:
                try:
                    fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    total, largest = map(int, stream.read().split())
                    silent = time.time() - os.fstat(stream.fileno()).st_mtime > _SILENT_S
                    found.append(_Use(total, 0 if silent else largest, path.name))
                else:
                    path.unlink(missing_ok=True)
        return found
