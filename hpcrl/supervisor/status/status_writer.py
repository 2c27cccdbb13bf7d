"""Writes what other processes can see of the supervisor: ``status.json`` and its events.

Nothing here fails or waits because of the filesystem (`hpcrl.reporting.reports`), but for the end, which waits for its
last words until a deadline.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from hpcrl.reporting.reports import ReportedFile
from hpcrl.runs.cause import Cause
from hpcrl.runs.clocks import Clocks
from hpcrl.runs.events import EventWriter
from hpcrl.runs.reserve import release_reserve
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import HEARTBEAT_S, ProcessId, RunState, RunStatus
from hpcrl.slurm.job_nodes import JobNodes
from hpcrl.supervisor.replicas.component import Component

_log = logging.getLogger(__name__)
_BEFORE_RESERVE_S = 1.0
"""Timeout in seconds for the last status before the disk space that is reserved for it is released."""


_WITH_RESERVE_S = 5.0
"""Timeout in seconds for the last status after that release."""


class _StatusFile(ReportedFile):
    """``status.json``, which a supervisor that was thought dead leaves to that of the newer attempt."""

    def __init__(self, run: RunDir, attempt: int, events: EventWriter) -> None:
        super().__init__(run.status_path, on_caught_up=events.caught_up)
        self._run, self._attempt = run, attempt

    def _write(self, data: list[bytes]) -> None:
        newest = (self._run.attempts() or [0])[-1]
        if newest > self._attempt:
            _log.warning("%s is left to attempt %d", self.path, newest)
            data.clear()
            return
        super()._write(data)


class StatusWriter:
    """State of the run, written on change and as a heartbeat."""

    def __init__(self, run: RunDir, *, run_id: str, attempt: int) -> None:
        self.run, self.run_id, self.attempt = run, run_id, attempt
        self.state = RunState.STARTING
        self.cause: Cause | None = None
        self.components: Sequence[Component] = ()
        self.warnings: list[str] = []
        self.nodes: JobNodes | None = None
        self._clocks = Clocks()
        self._started_at_s = time.time()
        self._ended_at_s: float | None = None
        self._written_at = 0.0
        self._dirty = True
        myself = ProcessId.of(os.getpid())
        assert myself is not None
        self._myself = myself
        self._events = EventWriter(run, attempt=attempt, writer="supervisor")
        self._file = _StatusFile(run, attempt, self._events)
        self._clocks_file = ReportedFile(Clocks.path(run, attempt), on_caught_up=self._events.caught_up)

    def emit(self, kind: str, **data: Any) -> None:
        """Append an event."""
        self._events.emit(kind, **data)

    def component_changed(self, component: Component) -> None:
        """Emit an event for the new state of a component, and schedule a write of the status."""
        status = component.status()
        details = {name: getattr(status, name) for name in ("pid", "port", "exit_code", "signal")}
        self.emit(
            "component.state",
            role=status.role,
            replica=status.replica,
            state=status.state,
            **{name: value for name, value in details.items() if value is not None},
        )
        self._dirty = True

    def changed(self) -> None:
        """Schedule a write of the status with the next tick."""
        self._dirty = True

    def note_clocks(self, clocks: Clocks) -> None:
        """Write down how far the clocks of nodes are off, where that is news."""
        if clocks == self._clocks:
            return
        news = {name: clock for name, clock in clocks.nodes.items() if clock != self._clocks.nodes.get(name)}
        self._clocks = clocks
        self._clocks_file.put(clocks.encode())
        self.emit("nodes.clocks", nodes=msgspec.to_builtins(news))
        if far := clocks.far:
            _log.warning("clocks are off: %s", ", ".join(f"{name} by {clock}" for name, clock in far.items()))
        self._dirty = True

    def enter(self, state: RunState, cause: Cause | None = None, *, because: str = "") -> None:
        """Change the state of the run, and emit an event.

        Parameters
        ----------
        because:
            Reason for people, if nothing failed.
        """
        self.state, self.cause = state, cause
        if state.ended:
            self._ended_at_s = time.time()
        details = {"cause": because} if because else {}
        if cause is not None:
            details = {"cause": cause.message, "cause_kind": cause.kind}
        self.emit("run.state", state=state, **details)
        self.write()

    def explain(self, cause: Cause) -> None:
        """Replace the cause of the run's end by one that explains more."""
        if self.state is RunState.STOPPING:
            self.cause = cause
            self.write()

    def tick(self) -> None:
        """Write if something changed, or if it is time for a heartbeat."""
        if self._dirty or time.monotonic() - self._written_at >= HEARTBEAT_S:
            self.write()

    def write(self) -> None:
        """Write the current state to ``status.json``."""
        self._dirty, self._written_at = False, time.monotonic()
        status = RunStatus(
            run_id=self.run_id,
            attempt=self.attempt,
            state=self.state,
            supervisor=self._myself,
            started_at_s=self._started_at_s,
            heartbeat_s=time.time(),
            ended_at_s=self._ended_at_s,
            cause=self.cause,
            components=[component.status() for component in self.components],
            warnings=self.warnings,
            clocks=self._clocks.nodes,
            spare_nodes=[] if self.nodes is None else self.nodes.idle(),
            lost_nodes={} if self.nodes is None else dict(self.nodes.lost),
        )
        self._file.put(status.encode())

    def close(self, timeout_s: float = 60.0) -> None:
        """Wait until the last reports are written, up to a timeout in seconds.

        What is not written then is tried for as long as the process lives.
        """
        began = time.monotonic()
        written = self._file.flush(min(_BEFORE_RESERVE_S, timeout_s))
        # the disk may be full: release the space that was reserved for this status
        kept = release_reserve(self.run, "supervisor")
        if not written and kept:
            written = self._file.flush(min(_WITH_RESERVE_S, timeout_s))
        if not written:  # the reserve of the submit: for an attempt that never had space of its own
            release_reserve(self.run, "start")
        if not written and not self._file.flush(timeout_s):
            _log.error(
                "the state %s of the run could not be written to %s within %g s: readers will assume that the "
                "supervisor is gone",
                self.state,
                self.run.status_path,
                timeout_s,
            )
        release_reserve(self.run, "roles")
        self._events.close(max(0.0, timeout_s - (time.monotonic() - began)))
