"""Events of one kind, read as they are written: each look reads the bytes that are new, and not the whole files."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from hpcrl.reporting import reports
from hpcrl.runs.events import OWN_S, Event, by_supervisor_clock, decode_events
from hpcrl.runs.rundir import RunDir

_BLOCK_BYTES = 4 << 20


@dataclass
class _Followed:
    """File of a writer, read up to ``offset``, which is the end of a line."""

    device: int
    inode: int
    offset: int = 0
    events: list[Event] = field(default_factory=list)

    def is_continued_by(self, found: os.stat_result) -> bool:
        """Return whether the file is still the one that was read, and was only appended to."""
        return (found.st_dev, found.st_ino) == (self.device, self.inode) and found.st_size >= self.offset


class EventTail:
    """Follows the events of one kind in all files of a run, those of later writers and attempts as well."""

    def __init__(self, run: RunDir, kind: str) -> None:
        """Prepare; nothing is read."""
        self._run, self._kind = run, kind
        self._files: dict[Path, _Followed] = {}

    def read(self) -> list[Event]:
        """Return all events of the kind that were written up to now, as `hpcrl.runs.events.read_events`.

        A line without its end is left for the next look. A file that was replaced or has become shorter is read again
        from its beginning, and what was read of it before does not count.

        Raises
        ------
        OSError
            A file exists and cannot be read.
        """
        reports.flush(OWN_S, directory=self._run.events_dir)
        paths = sorted(self._run.events_dir.glob("*.jsonl")) if self._run.events_dir.is_dir() else []
        before, self._files = self._files, {}
        for path in paths:
            self._files[path] = self._look(path, before.get(path))
        return by_supervisor_clock(self._run, [event for each in self._files.values() for event in each.events])

    def _look(self, path: Path, followed: _Followed | None) -> _Followed:
        found = path.stat()
        if followed is None or not followed.is_continued_by(found):
            followed = _Followed(found.st_dev, found.st_ino)
        if found.st_size == followed.offset:
            return followed
        with path.open("rb") as stream:
            stream.seek(followed.offset)
            torn = b""
            while block := stream.read(_BLOCK_BYTES):
                whole, end, torn = (torn + block).rpartition(b"\n")
                followed.events += decode_events(whole, self._kind)
                followed.offset += len(whole) + len(end)
        return followed
