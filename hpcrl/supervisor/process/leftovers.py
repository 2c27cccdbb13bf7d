"""Removes what roles leave on a node, marked as the run's. Standard library only, as the guard is.

Two things stay behind when a process is killed: files in its temporary directory (sockets of vLLM, compile caches),
and shared memory (``/dev/shm/psm_*``, ``torch_*``, ``sem.*``), whose names carry no mark.

Each replica therefore gets a temporary directory of its own, ``<scratch>/hpcrl-<id>/<attempt>-<role>-<replica>``, and
its guard notes there which files in ``/dev/shm`` the role's processes have open, by name and inode. At the end of the
role, and at the start of the next attempt on that node, these are removed: a file that has another inode by now, or
that any process still has open, belongs to another run and stays. Directories there in which rollouts lay
(`hpcrl.storage.shm_directories`) go with their owner, of whatever run of this user: the guard that finds one removes
it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from hpcrl.processes import procfs
from hpcrl.storage.shm_directories import remove_dead
from hpcrl.storage.trusted_paths import SCRATCH_PREFIX, NotOursError, check_parent, make_private

_SHM = "/dev/shm/"
_LIST = "shared-memory.json"
_ID_LENGTH = 12
"""Enough of a run id to be unique on a node; sockets below must have names of less than 108 bytes."""
_MAKINGS = 10
"""Maximum number of tries to make a directory while other guards remove the one above it."""


class Scratch:
    """The temporary directory of one replica on this node.

    Parameters
    ----------
    base:
        Node-local directory; ``$TMPDIR`` or ``/tmp`` where empty.
    run_id, attempt, role, replica, task:
        Run and replica that own the directory.
    """

    def __init__(self, base: str, *, run_id: str, attempt: int, role: str, replica: int, task: int = 0) -> None:
        root = Path(base or os.environ.get("TMPDIR") or "/tmp")
        self._run_dir, self._attempt = root / f"{SCRATCH_PREFIX}{run_id[:_ID_LENGTH]}", attempt
        self.path = self._run_dir / (f"{attempt}-{role}-{replica}" + (f"-{task}" if task else ""))
        self._noted: dict[str, int] = {}
        self.problem = ""

    def prepare(self) -> list[str]:
        """Remove what earlier attempts of this run, and an earlier life of this replica, left here; make the
        directory. Returns what was removed.

        Raises
        ------
        OSError
            The directory cannot be made, or others can replace it. If another user owns its name, another name is
            used, and `problem` reports it.
        """
        removed = remove_dead()
        self._run_dir.parent.mkdir(parents=True, exist_ok=True)
        check_parent(self._run_dir.parent)
        for left in reversed(range(_MAKINGS)):
            try:
                self._make(removed)
            except FileNotFoundError:
                if not left:
                    raise
            else:
                break
        return removed

    def _make(self, removed: list[str]) -> None:
        """Make the directory, adding to ``removed`` what was removed before.

        FileNotFoundError where the guard of a replica that ends now removed the empty directory above it meanwhile.
        """
        self.problem = ""
        try:
            make_private(self._run_dir)
        except NotOursError as error:
            import tempfile  # noqa: PLC0415 - hardly ever needed, and a tenth of a guard's start

            # not the node's own directory then: programs keep compiled code in it under predictable names
            self._run_dir = Path(tempfile.mkdtemp(prefix=f"{self._run_dir.name}-", dir=self._run_dir.parent))
            self.path = self._run_dir / self.path.name
            self.problem = f"{error}; a new one is used: {self._run_dir}"
        for path in sorted(self._run_dir.iterdir()):
            attempt = re.match(r"(\d+)-", path.name)
            if path == self.path or (attempt is not None and int(attempt[1]) < self._attempt):
                removed += _remove(path)
        self.path.mkdir(mode=0o700)

    def note(self, processes: Iterable[procfs.Process]) -> None:
        """Write down which files in ``/dev/shm`` the processes have open now."""
        found: dict[str, int] = {}
        for process in processes:
            found |= _shared_memory(process.pid)
        if found.items() <= self._noted.items():
            return
        self._noted |= found
        with contextlib.suppress(OSError):
            temporary = self.path / f".{_LIST}"
            temporary.write_text(json.dumps(self._noted))
            os.replace(temporary, self.path / _LIST)

    def remove(self) -> list[str]:
        """Remove the directory and the noted shared memory that no process has open; return what was left behind."""
        # before the noted files: without its lock the owner of a directory would be unknown
        removed = remove_dead()
        if not self.path.is_dir():
            return removed
        removed += _remove(self.path)
        with contextlib.suppress(OSError):  # other replicas are still here
            self._run_dir.rmdir()
        return removed


def _remove(path: Path) -> list[str]:
    """Remove the directory of one replica; returns names of sockets, files and shared memory in it."""
    removed: list[str] = []
    try:
        noted = json.loads((path / _LIST).read_text())
    except (OSError, ValueError):
        noted = {}
    if noted:
        in_use = {name for process in procfs.all_processes().values() for name in _shared_memory(process.pid)}
        for name, inode in noted.items():
            with contextlib.suppress(OSError):
                if name not in in_use and os.lstat(name).st_ino == inode:
                    os.unlink(name)
                    removed.append(name)
    # other guards of this node remove it at the same time: os.walk passes over what is gone
    removed += [os.path.join(where, name) for where, _, names in os.walk(path) for name in names if name != _LIST]
    shutil.rmtree(path, ignore_errors=True)
    return removed


def _shared_memory(pid: int) -> dict[str, int]:
    """Return the files in ``/dev/shm`` that a process has mapped or open, with their inodes; empty if not permitted."""
    found: dict[str, int] = {}
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", errors="surrogateescape") as stream:
        for line in stream:
            if _SHM in line:
                fields = line.rstrip("\n").split(maxsplit=5)
                found[fields[5]] = int(fields[4])
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                name = os.readlink(entry.path)
                if name.startswith(_SHM):
                    found[name] = entry.stat().st_ino
    return {name: inode for name, inode in found.items() if not name.endswith(" (deleted)")}
