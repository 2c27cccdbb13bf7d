"""What a role says about its progress, for the supervisor's watchdog and for ``status``.

One small file a process, ``attempts/<n>/progress/<writer>.json``, replaced when the work changes. It is not
synchronised to disk: after a crash of the machine nobody asks for it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from hpcrl.decoding import prepared
from hpcrl.reporting import ReportedFile
from hpcrl.runs.rundir import RunDir

__all__ = ["ProgressReporter", "RoleProgress", "progress_path"]


class RoleProgress(msgspec.Struct, frozen=True, kw_only=True):
    """What a process does.

    Attributes
    ----------
    time_s:
        When it was written, in seconds since the epoch.
    phase:
        Its work, for example ``forward_backward``.
    waits:
        In this phase it waits for another role, however long that takes; it says so again every few seconds.
    counts:
        What it has done so far, by name.
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
        """What the file says; None where there is none, or it cannot be read now."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=prepared(cls))
        except (OSError, msgspec.DecodeError):
            return None

    def words(self) -> str:
        """Say it for people: ``step 12, forward_backward``."""
        return ", ".join([*(f"{name} {value:g}" for name, value in self.counts.items()), self.phase])


def progress_path(run: RunDir, attempt: int, role: str, replica: int) -> Path:
    """The file in which rank 0 of a replica says where it is; the watchdog reads how old that is."""
    return run.attempt_dir(attempt) / "progress" / f"{role}-{replica}.json"


class ProgressReporter:
    """Writes the file of this process, when a phase begins and with each beat.

    A full disk, a stale handle or a filesystem that hangs must not end or hold up training: see `hpcrl.reporting`.
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
        """Say that the process does ``phase`` and is alive."""
        self._counts.update(counts)
        self._write(phase, waits=False)

    def again(self) -> None:
        """Say that the phase goes on: who waits and says nothing counts as hung."""
        self._write(self._phase, waits=self._waits)

    def _write(self, phase: str, *, waits: bool) -> None:
        self._phase, self._waits = phase, waits
        progress = RoleProgress(
            time_s=time.time(), phase=phase, waits=waits, counts=self._counts, longest_s=self._longest
        )
        self._file.put(msgspec.json.encode(progress))
