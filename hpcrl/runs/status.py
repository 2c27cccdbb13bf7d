"""``status.json``: the state of an attempt and its roles, as the supervisor last wrote it."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from hpcrl import procfs
from hpcrl.decoding import prepared
from hpcrl.fs import atomic_write
from hpcrl.runs.cause import Cause
from hpcrl.runs.clocks import NodeClock
from hpcrl.runs.rundir import RunDir

__all__ = ["HEARTBEAT_S", "ComponentState", "ComponentStatus", "ProcessId", "ReplicaJob", "RunState", "RunStatus"]

FORMAT_VERSION = 1
HEARTBEAT_S = 2.0
"""The supervisor writes at least this often, in seconds."""
_STALE_HEARTBEATS = 30
"""Heartbeats missed by a supervisor on another host before it counts as dead (its clock and NFS may lag)."""


class RunState(StrEnum):
    """State of a run. The supervisor writes all but `SUBMITTED` and `LOST`, which readers infer; of `REQUEUED` both."""

    SUBMITTED = "SUBMITTED"
    """Handed over; the supervisor has not written yet."""
    STARTING = "STARTING"
    """Roles are being started."""
    RUNNING = "RUNNING"
    """All roles are ready."""
    STOPPING = "STOPPING"
    """Roles are being stopped; the outcome is known, but not yet that nothing is left."""
    REQUEUED = "REQUEUED"
    """The attempt has ended, Slurm starts the next one."""
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    LOST = "LOST"
    """The supervisor is gone and left no last word."""

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen in this attempt."""
        return self in (RunState.COMPLETED, RunState.FAILED, RunState.CANCELLED, RunState.LOST)


class ComponentState(StrEnum):
    """State of one replica of a role."""

    PENDING = "PENDING"
    """Waits for the roles it comes after."""
    STARTING = "STARTING"
    """Its process runs, its probe has not succeeded yet."""
    READY = "READY"
    RESTARTING = "RESTARTING"
    """It failed or hung, and is started again after a pause."""
    STOPPING = "STOPPING"
    """It was asked to stop."""
    EXITED = "EXITED"
    """Ended as it should: cleanly, or after it was asked."""
    FAILED = "FAILED"
    """Ended by itself with an error, or was never ready."""
    LOST = "LOST"
    """Inferred by readers: its supervisor is gone."""

    @property
    def ended(self) -> bool:
        """Whether it has no process any more."""
        return self in (ComponentState.EXITED, ComponentState.FAILED, ComponentState.LOST)


class ProcessId(msgspec.Struct, frozen=True, kw_only=True):
    """Names one process for good: a pid alone is given away again.

    Attributes
    ----------
    host, boot_id:
        Machine, and which of its boots.
    pid, start_ticks:
        See `hpcrl.procfs.Process`.
    """

    host: str
    boot_id: str
    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """The process that has ``pid`` on this machine now; None where there is none."""
        process = procfs.read_process(pid)
        if process is None:
            return None
        return cls(host=procfs.hostname(), boot_id=procfs.boot_id(), pid=pid, start_ticks=process.start_ticks)

    def alive(self) -> bool | None:
        """Whether it still runs; None where that cannot be seen from this machine."""
        if self.host != procfs.hostname():
            return None
        return self.boot_id == procfs.boot_id() and procfs.is_alive(self.pid, self.start_ticks)


class ReplicaJob(msgspec.Struct, frozen=True, kw_only=True):
    """The Slurm job of one replica (layout ``elastic``), as the supervisor last heard of it.

    Attributes
    ----------
    job_id:
        None while it has none.
    state, reason:
        In Slurm's words; empty where it has no job.
    replaced:
        Jobs of this replica that ended in this attempt and were replaced.
    lost:
        How the replica was lost the last time, in a sentence; empty where it never was.
    """

    job_id: int | None = None
    state: str = ""
    reason: str = ""
    replaced: int = 0
    lost: str = ""


class ComponentStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One replica of a role.

    Attributes
    ----------
    state:
        Where it stands.
    pid, guard_pid:
        The role's process and the guard above it; None before the start.
    host, port:
        Its address.
    nodes:
        Slurm's names of its nodes, in order; empty on this machine.
    started_at_s, ready_at_s, ended_at_s:
        Seconds since the epoch; None where it has not come to that.
    exit_code, signal:
        How it ended; one of the two.
    log:
        Log file, relative to the run directory.
    job:
        Its own job, where it has one.
    restarts:
        How often it was started again in this attempt.
    last_failure:
        How its life before this one ended; empty without a restart.
    progress:
        What it said or showed last of its work, in words; empty where it says nothing.
    progress_at_s:
        When that last changed, in seconds since the epoch.
    """

    role: str
    replica: int
    state: ComponentState
    pid: int | None = None
    guard_pid: int | None = None
    host: str | None = None
    port: int | None = None
    nodes: list[str] = []
    started_at_s: float | None = None
    ready_at_s: float | None = None
    ended_at_s: float | None = None
    exit_code: int | None = None
    signal: int | None = None
    log: str = ""
    job: ReplicaJob | None = None
    restarts: int = 0
    last_failure: str = ""
    progress: str = ""
    progress_at_s: float | None = None


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What the supervisor says.

    Attributes
    ----------
    run_id:
        Id of the run, from its record.
    attempt:
        Number of the attempt.
    state, cause:
        Where the run stands; why it ended or is ending (None while it runs, and after success).
    supervisor:
        The process that wrote this.
    started_at_s, heartbeat_s, ended_at_s:
        Seconds since the epoch.
    components:
        All replicas of all roles.
    warnings:
        What will end the run, or keeps it from being seen, if nobody acts: a sentence each.
    clocks:
        How far the clocks of the attempt's nodes are ahead of the supervisor's; empty outside of Slurm.
    """

    run_id: str
    attempt: int
    state: RunState
    supervisor: ProcessId
    started_at_s: float
    heartbeat_s: float
    ended_at_s: float | None = None
    cause: Cause | None = None
    components: list[ComponentStatus] = []
    warnings: list[str] = []
    clocks: dict[str, NodeClock] = {}
    format_version: int = FORMAT_VERSION

    def encode(self) -> bytes:
        """As ``status.json`` has it."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"

    def write(self, run: RunDir) -> None:
        """Replace ``status.json``."""
        atomic_write(run.status_path, self.encode())

    @classmethod
    def read(cls, run: RunDir) -> RunStatus | None:
        """The last status; None where no supervisor has written yet."""
        try:
            return msgspec.json.decode(run.status_path.read_bytes(), type=prepared(cls))
        except FileNotFoundError:
            return None

    @classmethod
    def ready_since(cls, run: RunDir, attempt: int, role: str, replica: int) -> float | None:
        """Since when the present process of a replica is ready, in seconds since the epoch: another time, another
        process. None where it is not, and where that cannot be read now."""
        try:
            status = cls.read(run)
        except (OSError, ValueError):
            return None
        if status is None or status.attempt != attempt:
            return None
        named = (c for c in status.components if (c.role, c.replica) == (role, replica))
        return next((c.ready_at_s for c in named if c.state is ComponentState.READY), None)

    def supervisor_alive(self, now_s: float) -> bool:
        """Whether the supervisor still runs; seen from another machine, whether its heartbeat is fresh."""
        alive = self.supervisor.alive()
        if alive is None:
            return now_s - self.heartbeat_s < _STALE_HEARTBEATS * HEARTBEAT_S
        return alive
