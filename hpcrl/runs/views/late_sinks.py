"""Warnings about sinks that do not have the newest steps of a run, for ``hpcrl status``."""

from __future__ import annotations

import time

from hpcrl.errors import HpcrlError
from hpcrl.runs.metrics import read_newest
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.sink_position import position_path, read_position

_SETTLED_S = 60.0
"""Age in seconds of the newest step from which on each sink should have it."""
_LATE_S = 600.0
"""Time in seconds for which a sink may have got nothing while steps were made."""


def sink_warnings(run: RunDir, *, now_s: float | None = None) -> list[str]:
    """Return a sentence for each sink that has failed, hangs or is cut off: it lacks steps that others have."""
    now_s = time.time() if now_s is None else now_s
    try:
        sinks, newest = run.plan().sinks, read_newest(run)
    except (HpcrlError, OSError):
        return []
    if not sinks or newest is None:
        return []
    found = []
    for sink in sinks:
        last, since_s = _given(run, sink.name)
        late = newest.step - last > 1 and newest.time_s - since_s > _LATE_S
        if last < newest.step and (late or now_s - newest.time_s > _SETTLED_S):
            log = run.sinks_dir / f"{sink.name}.log"
            found.append(
                f"sink {sink.name} has {last:,} of {newest.step:,} steps; the reason may be in {log}; "
                f"after the end of the run, hpcrl sinks send {run.name} sends the rest"
            )
    return found


def _given(run: RunDir, name: str) -> tuple[int, float]:
    """Return the last step that a sink was given, and when that was, or when sinks were started."""
    given = read_position(run, name)
    try:
        if given is not None:
            return given.last_step, position_path(run, name).stat().st_mtime
        return 0, run.sinks_dir.stat().st_mtime
    except OSError:
        return 0, 0.0
