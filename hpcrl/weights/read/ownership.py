"""Election of one of several processes of a node by lock files, which expire when their owner dies.

A lock file is created complete by ``link`` and identifies its owner by pid, start time, boot and pid namespace. A dead
owner's lock is not removed but superseded by the next generation, so that two processes that find it dead cannot both
take over.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path
from typing import NamedTuple

from hpcrl.processes.procfs import boot_id, is_alive, read_process
from hpcrl.storage import lost_replies


class Owner(NamedTuple):
    """Process of this node.

    Attributes
    ----------
    pid, start_ticks:
        Identify the process in its namespace.
    namespace:
        Inode of its pid namespace: the pid of a process in another namespace (a container) is meaningless here.
    boot:
        Id of the boot in which it runs.
    """

    pid: int
    start_ticks: int
    namespace: str
    boot: str

    def __str__(self) -> str:
        return f"{self.pid}-{self.start_ticks}-{self.namespace}-{self.boot}"

    @classmethod
    def parse(cls, text: str) -> Owner | None:
        """Return the owner that ``str`` encoded; None where the text is something else."""
        pid, _, rest = text.partition("-")
        start, _, rest = rest.partition("-")
        namespace, _, boot = rest.partition("-")
        return cls(int(pid), int(start), namespace, boot) if pid.isdecimal() and start.isdecimal() else None

    @property
    def alive(self) -> bool:
        """Return whether the process runs. A process in another namespace cannot be observed, and counts as alive."""
        if self.boot != boot_id():
            return False
        return self.namespace != _namespace() or is_alive(self.pid, self.start_ticks)


def current_owner() -> Owner:
    """Return the owner that this process is."""
    process = read_process(os.getpid())
    assert process is not None
    return Owner(process.pid, process.start_ticks, _namespace(), boot_id())


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid").strip("pid:[]")
    except OSError:
        return ""


class OwnerLock:
    """Lock of one node, on a filesystem of that node that has hard links."""

    def __init__(self, path: Path) -> None:
        self._path, self._held = path, None

    _held: Path | None

    def acquire(self) -> bool:
        """Take the lock unless a live process has it, without waiting; return whether it was taken.

        Raises
        ------
        OSError
            The directory is missing or full.
        """
        generations = self._generations()
        if any(owner is not None and owner.alive for owner in generations.values()):
            return False
        temporary = self._path.with_name(f".{self._path.name}.{uuid.uuid4().hex}")
        mine = self._name(max(generations, default=0) + 1)
        try:
            temporary.write_text(str(current_owner()))
            lost_replies.link(temporary, mine)
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
        self._held = mine
        others = {g: owner for g, owner in self._generations().items() if self._name(g) != mine}
        if any(owner is not None and owner.alive for owner in others.values()):
            self.release()  # both may give up; the next attempt decides
            return False
        for generation in others:
            self._name(generation).unlink(missing_ok=True)
        return True

    def release(self) -> None:
        """Release the lock."""
        if self._held is not None:
            self._held.unlink(missing_ok=True)
            self._held = None

    def _name(self, generation: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{generation}")

    def _generations(self) -> dict[int, Owner | None]:
        prefix, found = f"{self._path.name}.", {}
        for name in os.listdir(self._path.parent):
            number = name.removeprefix(prefix)
            if name != number and number.isdecimal():
                with contextlib.suppress(FileNotFoundError):
                    found[int(number)] = Owner.parse((self._path.parent / name).read_text())
        return found


def live_owners(directory: Path, prefix: str, *, owner_inside: bool = False) -> list[str]:
    """Return live owners of the files whose names begin with ``prefix``; remove the files of dead ones.

    ``owner_inside``: a file has its owner in its text, not in its name, and is not removed.
    """
    found = []
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(directory):
            if name.startswith(prefix):
                with contextlib.suppress(FileNotFoundError):
                    text = (directory / name).read_text() if owner_inside else name.removeprefix(prefix)
                    owner = Owner.parse(text)
                    if owner is None or owner.alive:
                        found.append(text)
                    elif not owner_inside:
                        (directory / name).unlink()
    return found
