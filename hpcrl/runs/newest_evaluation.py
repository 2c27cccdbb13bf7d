"""The newest held-out evaluation of a run, for lists of many runs: without reading all of its events."""

from __future__ import annotations

import os
from pathlib import Path

from hpcrl.runs.events import Event
from hpcrl.runs.lenient import convert_lenient, decode_lenient
from hpcrl.runs.past import read_past
from hpcrl.runs.run_progress import Evaluation
from hpcrl.runs.rundir import RunDir

_TAIL_BYTES = 1 << 16
"""First part that is read from the end of a file; each further one is four times as long."""
_MAX_BYTES = 1 << 22
"""Maximum bytes that are read of one file: an evaluation farther from its end is left out."""
_KIND = b'"evaluation"'


def read_newest_evaluation(run: RunDir) -> Evaluation | None:
    """Return the newest held-out evaluation; None where there is none, or it lies far behind.

    It is that of `hpcrl.runs.run_progress.read_evaluations`, by the orchestrator's own clock.
    """
    attempts = run.attempts()
    for attempt in reversed(attempts):
        event = _newest_event(run.events_dir / f"{attempt:04d}-orchestrator-0.jsonl")
        if event is None:
            continue
        data = {**event.data, "time_s": event.time_s, "attempt": event.attempt}
        if data.get("due") == data.get("version"):
            data.pop("due", None)
        found = convert_lenient(data, Evaluation)
        # the newest attempt has abandoned nothing of its own
        if found is not None and (attempt == attempts[-1] or read_past(run).holds(attempt, found.version)):
            return found
    return None


def _newest_event(path: Path) -> Event | None:
    try:
        with path.open("rb") as stream:
            end = stream.seek(0, os.SEEK_END)
            size = _TAIL_BYTES
            while True:
                stream.seek(max(0, end - size))
                for line in reversed(stream.read(size).split(b"\n")):
                    # None: torn, or cut by where the tail begins
                    if _KIND in line and (event := decode_lenient(line, Event)) and event.kind == "evaluation":
                        return event
                if size >= min(end, _MAX_BYTES):
                    return None
                size *= 4
    except OSError:
        return None
