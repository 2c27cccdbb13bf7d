"""Reads what is appended to the files of a run that facts are found in; each line once."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from hpcrl.runs.events import Event
from hpcrl.runs.lenient import decode_lenient
from hpcrl.runs.metrics_files import MetricsTail
from hpcrl.runs.outlets.notices.run_facts import StepCounts
from hpcrl.runs.rundir import RunDir

_WRITERS = ("*-supervisor.jsonl", "*-orchestrator-*.jsonl")
_WANTED = re.compile(
    rb'"kind":"(?:run\.state|run\.space_low|run\.space_gone|attempt\.retried|nodes\.replaced|component\.hung|evaluation)"'
)
_MAX_READ = 16 << 20
"""Maximum bytes that are read of a file at once."""


class RunTail:
    """The events and steps of a run in the order of attempts and times, as far as they are written."""

    def __init__(self, run: RunDir) -> None:
        """Begin with the first attempt."""
        self._run = run
        self._offsets: dict[Path, int] = {}
        self._metrics = MetricsTail(run)

    def events(self) -> list[Event]:
        """Return the events that were written since the last call."""
        files = [path for pattern in _WRITERS for path in sorted(self._run.events_dir.glob(pattern))]
        found = [decode_lenient(line, Event) for path in files for line in self._lines(path) if _WANTED.search(line)]
        return sorted((each for each in found if each is not None), key=lambda each: (each.attempt, each.time_s))

    def steps(self) -> list[StepCounts]:
        """Return the steps that were written since the last call."""
        found = [decode_lenient(line, StepCounts) for line in self._metrics.lines()]
        return [each for each in found if each is not None]

    def _lines(self, path: Path) -> Iterator[bytes]:
        """Yield the whole lines behind those that were read before; a torn last line waits for its end."""
        while True:
            data = b""
            with contextlib.suppress(FileNotFoundError), path.open("rb") as stream:
                stream.seek(self._offsets.get(path, 0))
                data = stream.read(_MAX_READ)
            end = data.rfind(b"\n") + 1
            self._offsets[path] = self._offsets.get(path, 0) + end
            yield from (line for line in data[:end].split(b"\n") if line)
            if len(data) < _MAX_READ or not end:
                return
