"""Who of several processes of one node does a thing: election by lock files, decided by who lives.

A lock file is made whole by ``link`` and names its owner by pid, start time, boot and pid namespace. A dead owner's
lock is not removed but overruled by the next generation, so that two who find it dead cannot both take over.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path
from typing import NamedTuple

from hpcrl import lost_answers
from hpcrl.procfs import boot_id, is_alive, read_process

__all__ = ["Owner", "OwnerLock", "living", "myself"]


class Owner(NamedTuple):
    """A process of this node.

    Attributes
    ----------
    pid, start_ticks:
        Name the process in its namespace.
    namespace:
        Inode of its pid namespace: in another one (a container) its pid means nothing here.
    boot:
        Id of the boot that it runs in.
    """

    pid: int
    start_ticks: int
    namespace: str
    boot: str

    def __str__(self) -> str:
        return f"{self.pid}-{self.start_ticks}-{self.namespace}-{self.boot}"

    @classmethod
    def parse(cls, text: str) -> Owner | None:
        """Read what ``str`` gave; None where it is something else."""
        pid, _, rest = text.partition("-")
        start, _, rest = rest.partition("-")
        namespace, _, boot = rest.partition("-")
        return cls(int(pid), int(start), namespace, boot) if pid.isdecimal() and start.isdecimal() else None

    @property
    def alive(self) -> bool:
        """Whether it runs. Of a process in another namespace nothing is known; it counts as alive."""
        if self.boot != boot_id():
            return False
        return self.namespace != _namespace() or is_alive(self.pid, self.start_ticks)


def myself() -> Owner:
    """This process."""
    process = read_process(os.getpid())
    assert process is not None
    return Owner(process.pid, process.start_ticks, _namespace(), boot_id())


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid").strip("pid:[]")
    except OSError:
        return ""


class OwnerLock:
    """A lock of one node, on a filesystem of that node that has hard links."""

    def __init__(self, path: Path) -> None:
        self._path, self._held = path, None

    _held: Path | None

    def acquire(self) -> bool:
        """Take the lock where nobody who lives has it; at once, without waiting.

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
            temporary.write_text(str(myself()))
            lost_answers.link(temporary, mine)
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
        self._held = mine
        others = {g: owner for g, owner in self._generations().items() if self._name(g) != mine}
        if any(owner is not None and owner.alive for owner in others.values()):
            self.release()  # both may give way; the next try decides
            return False
        for generation in others:
            self._name(generation).unlink(missing_ok=True)
        return True

    def release(self) -> None:
        """Give the lock back."""
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


def living(directory: Path, prefix: str, *, owner_inside: bool = False) -> list[str]:
    """Living owners of the files of a directory whose names begin with ``prefix``; files of the dead are removed.

    ``owner_inside``: a file names its owner in its text, not in its name; it stays.
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
