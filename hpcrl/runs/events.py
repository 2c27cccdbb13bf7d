"""What happened in a run, as JSON lines.

Each writer has a file of its own, because appends from several nodes to one file on NFS may overwrite each
other; a reader merges the files by time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from hpcrl import reporting
from hpcrl.reporting import Outage, ReportedLines
from hpcrl.runs.clocks import Clocks, own_node
from hpcrl.runs.lenient import decode_lenient
from hpcrl.runs.rundir import RunDir

__all__ = ["Event", "EventWriter", "read_events"]

_log = logging.getLogger(__name__)
_CLOSE_S = 10.0
_OWN_S = 2.0
"""How long a reader waits for what its own process has not written yet."""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happened.

    Attributes
    ----------
    time_s:
        Seconds since the epoch: in the file by the writer's clock, as read by the supervisor's.
    attempt:
        Attempt it belongs to.
    writer:
        ``<role>-<replica>`` or ``supervisor``.
    kind:
        Dotted name, for example ``engine.weights_updated``; docs/events.md lists them.
    data:
        Details.
    node:
        Slurm's name of the writer's node; empty outside of Slurm.
    """

    time_s: float
    attempt: int
    writer: str
    kind: str
    data: dict[str, Any] = {}
    node: str = ""


class EventWriter:
    """Appends events of one writer; each line is one ``write`` and survives the death of the writer.

    Nothing here fails or waits because of the filesystem: see `hpcrl.reporting`.
    """

    def __init__(self, run: RunDir, *, attempt: int, writer: str) -> None:
        self.attempt, self.writer, self._node = attempt, writer, own_node()
        self._run = run
        path = run.events_dir / f"{attempt:04d}-{writer}.jsonl"
        self._lines = ReportedLines(path, on_caught_up=self.caught_up)

    def emit(self, kind: str, **data: Any) -> None:
        """Record that ``kind`` happened now, and say so in the log. ``data`` must be encodable as JSON."""
        event = Event(
            time_s=time.time(), attempt=self.attempt, writer=self.writer, kind=kind, data=data, node=self._node
        )
        self._lines.append(msgspec.json.encode(event))
        _log.info("%s %s", kind, " ".join(f"{name}={_short(value)}" for name, value in data.items()))

    def caught_up(self, outage: Outage) -> None:
        """Record that a report of this process could be written again."""
        file = outage.path
        self.emit(
            "reports.caught_up",
            file=str(file.relative_to(self._run.path) if file.is_relative_to(self._run.path) else file),
            seconds=outage.seconds,
            problem=outage.problem,
            dropped=outage.dropped,
        )

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Wait until all is written, for so many seconds at most, and close the file.

        What is not written then is tried until the process ends.
        """
        if not self._lines.flush(timeout_s):
            _log.error("not all events could be written within %g s: %s", timeout_s, self._lines.path)
        self._lines.close()


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return "{" + " ".join(f"{name}={_short(item)}" for name, item in value.items()) + "}"
    return str(value)


def _read_file(path: Path, kind: str) -> Iterator[Event]:
    for line in path.read_bytes().split(b"\n"):
        if kind.encode() not in line:
            continue  # before decoding: who follows a run asks for few of very many lines, again and again
        event = decode_lenient(line, Event)
        if event is None:
            continue  # empty, or the torn last line of a writer that was killed
        if kind in ("", event.kind):
            yield event


def read_events(run: RunDir, *, attempt: int | None = None, kind: str = "") -> list[Event]:
    """All events of a run (or of one attempt, or of one kind) in time order, by the supervisor's clock.

    What this process has said itself is written first. Torn last lines of writers that were killed are passed over, and
    a run without events has none.

    Parameters
    ----------
    kind:
        ``trainer.step``, for example; the empty one means all kinds.

    Raises
    ------
    OSError
        A file is there and cannot be read: nobody is told that nothing happened.
    """
    reporting.flush(_OWN_S, directory=run.events_dir)  # a process reads what it has said itself
    pattern = "*.jsonl" if attempt is None else f"{attempt:04d}-*.jsonl"
    if not run.events_dir.is_dir():
        return []
    events = [event for path in sorted(run.events_dir.glob(pattern)) for event in _read_file(path, kind)]
    clocks = {number: Clocks.read(run, number) for number in {event.attempt for event in events if event.node}}
    if any(clock.differs for known in clocks.values() for clock in known.nodes.values()):
        events = [
            msgspec.structs.replace(event, time_s=clocks[event.attempt].corrected(event.time_s, event.node))
            if event.node
            else event
            for event in events
        ]
    return sorted(events, key=lambda event: event.time_s)
