"""Events of a run, as JSON lines.

Each writer has a file of its own, because appends from several nodes to one file on NFS may overwrite each
other; a reader merges the files by time. Events are plain values without cycles, as records of steps
(`hpcrl.runs.metrics`), and are left out of Python's collection of cycles.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from hpcrl.reporting import reports
from hpcrl.reporting.reports import Outage, ReportedLines
from hpcrl.runs.clocks import Clocks, own_node
from hpcrl.runs.lenient import decode_lenient
from hpcrl.runs.rundir import RunDir

_log = logging.getLogger(__name__)
_CLOSE_S = 10.0
OWN_S = 2.0
"""Maximum time in seconds that a reader waits for pending events of its own process."""


class Event(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Event of a run.

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

    Nothing here fails or waits because of the filesystem: see `hpcrl.reporting.reports`.
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
        """Wait at most ``timeout_s`` seconds until all is written, and close the file.

        Events that are not written then are retried until the process ends.
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


def decode_events(data: bytes, kind: str) -> Iterator[Event]:
    """Return the events of a kind in lines of a file; the empty kind means all. Lines that are not events are left out.

    Parameters
    ----------
    data:
        Whole lines; the last one may be torn.
    """
    # before decoding, because a command that follows a run needs few of very many lines, repeatedly
    wanted = kind.encode()
    if wanted not in data:
        return
    for line in data.split(b"\n"):
        if wanted not in line:
            continue
        event = decode_lenient(line, Event)
        if event is None:
            continue  # empty, or the torn last line of a writer that was killed
        if kind in ("", event.kind):
            yield event


def read_events(run: RunDir, *, attempt: int | None = None, kind: str = "") -> list[Event]:
    """Return all events of a run (or of one attempt, or of one kind) in time order, by the supervisor's clock.

    Pending events of this process are written first. Torn last lines of killed writers are skipped. A run without
    events gives an empty list.

    Parameters
    ----------
    kind:
        ``trainer.step``, for example; the empty one means all kinds.

    Raises
    ------
    OSError
        A file exists and cannot be read; it is not treated as empty.
    """
    reports.flush(OWN_S, directory=run.events_dir)  # so that a process reads its own events
    pattern = "*.jsonl" if attempt is None else f"{attempt:04d}-*.jsonl"
    if not run.events_dir.is_dir():
        return []
    events = [
        event for path in sorted(run.events_dir.glob(pattern)) for event in decode_events(path.read_bytes(), kind)
    ]
    return by_supervisor_clock(run, events)


def by_supervisor_clock(run: RunDir, events: list[Event]) -> list[Event]:
    """Return events with times by the supervisor's clock, in time order."""
    clocks = {number: Clocks.read(run, number) for number in {event.attempt for event in events if event.node}}
    if any(clock.differs for known in clocks.values() for clock in known.nodes.values()):
        events = [
            msgspec.structs.replace(event, time_s=clocks[event.attempt].corrected(event.time_s, event.node))
            if event.node
            else event
            for event in events
        ]
    return sorted(events, key=lambda event: event.time_s)
