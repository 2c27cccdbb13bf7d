"""Progress of a role, for the supervisor's watchdog and for ``status``.

Each process has one small file, ``attempts/<n>/progress/<writer>.json``, replaced when the work changes. It is not
synchronised to disk, because it is not needed after a crash of the machine.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from hpcrl.reporting.reports import ReportedFile
from hpcrl.runs.rundir import RunDir
from hpcrl.storage.msgspec_types import prepared


class RoleProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of a process.

    Attributes
    ----------
    time_s:
        Time of writing, in seconds since the epoch.
    phase:
        Its work, for example ``forward_backward``.
    waits:
        In this phase it waits for another role without a time limit; it repeats the report every few seconds.
    counts:
        Completed work by name.
    longest_s:
        Longest duration so far of each phase that it has left, in seconds.
    """

    time_s: float
    phase: str
    waits: bool = False
    counts: dict[str, float] = {}
    longest_s: dict[str, float] = {}

    @classmethod
    def read(cls, path: Path) -> RoleProgress | None:
        """Return the content of the file; None where it does not exist, or cannot be read now."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=prepared(cls))
        except (OSError, msgspec.DecodeError):
            return None

    def words(self) -> str:
        """Return the progress in words: ``step 12, forward_backward``."""
        return ", ".join([*(f"{name} {value:g}" for name, value in self.counts.items()), self.phase])


def progress_path(run: RunDir, attempt: int, role: str, replica: int) -> Path:
    """Return the path of rank 0's progress file of a replica; the watchdog reads its age."""
    return run.attempt_dir(attempt) / "progress" / f"{role}-{replica}.json"


class ProgressReporter:
    """Writes the file of this process, when a phase begins and with each beat.

    A full disk, a stale handle or a filesystem that hangs must not end or hold up training: see
    `hpcrl.reporting.reports`.
    """

    def __init__(self, path: Path) -> None:
        self._file = ReportedFile(path, durable=False)
        self._counts: dict[str, float] = {}
        self._longest: dict[str, float] = {}
        self._phase, self._waits = "", False

    def count(self, **counts: float) -> None:
        """Set counts; they are written with the next phase or beat."""
        self._counts.update(counts)

    @contextlib.contextmanager
    def phase(self, name: str, *, waits: bool = False) -> Iterator[None]:
        """Work of one kind."""
        began = time.monotonic()
        self._write(name, waits=waits)
        try:
            yield
        finally:
            seconds = time.monotonic() - began
            if not waits:
                self._longest[name] = max(self._longest.get(name, 0.0), seconds)

    def beat(self, phase: str, **counts: float) -> None:
        """Report that the process does ``phase`` and is alive."""
        self._counts.update(counts)
        self._write(phase, waits=False)

    def again(self) -> None:
        """Report that the phase continues: a role that waits without reports counts as hung."""
        self._write(self._phase, waits=self._waits)

    def _write(self, phase: str, *, waits: bool) -> None:
        self._phase, self._waits = phase, waits
        progress = RoleProgress(
            time_s=time.time(), phase=phase, waits=waits, counts=self._counts, longest_s=self._longest
        )
        self._file.put(msgspec.json.encode(progress))
