"""``status.json``: the state of an attempt and its roles, as the supervisor last wrote it."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from hpcrl.errors import RunDirError
from hpcrl.processes import procfs
from hpcrl.runs.cause import Cause
from hpcrl.runs.clocks import NodeClock
from hpcrl.runs.rundir import RunDir
from hpcrl.storage.files import atomic_write
from hpcrl.storage.msgspec_types import prepared

FORMAT_VERSION = 1
HEARTBEAT_S = 2.0
"""Maximum time in seconds between two writes of the supervisor."""
_STALE_HEARTBEATS = 30
"""Number of missed heartbeats after which a supervisor on another host counts as dead (its clock and NFS may lag)."""


class RunState(StrEnum):
    """State of a run. The supervisor writes all but `QUEUED`, `SUBMITTED` and `LOST`, which readers infer."""

    QUEUED = "QUEUED"
    """Waits for its sweep to start it (`hpcrl.sweeps`); nothing of it runs."""
    SUBMITTED = "SUBMITTED"
    """Submitted; the supervisor has not written yet."""
    STARTING = "STARTING"
    """Roles are being started."""
    RUNNING = "RUNNING"
    """All roles are ready."""
    STOPPING = "STOPPING"
    """Roles are being stopped; the outcome is known, but processes may still run."""
    REQUEUED = "REQUEUED"
    """The attempt has ended, Slurm starts the next one."""
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    LOST = "LOST"
    """The supervisor is gone without recording an end."""

    @property
    def ended(self) -> bool:
        """Return whether the attempt has ended."""
        return self in (RunState.COMPLETED, RunState.FAILED, RunState.CANCELLED, RunState.LOST)


class ComponentState(StrEnum):
    """State of one replica of a role."""

    PENDING = "PENDING"
    """Waits for roles that start before it."""
    STARTING = "STARTING"
    """Its process runs, its probe has not succeeded yet."""
    READY = "READY"
    RESTARTING = "RESTARTING"
    """It failed or hung, and is restarted after a pause."""
    STOPPING = "STOPPING"
    """It was asked to stop."""
    EXITED = "EXITED"
    """Ended as expected: cleanly, or after a stop request."""
    FAILED = "FAILED"
    """Ended by itself with an error, or was never ready."""
    LOST = "LOST"
    """Inferred by readers: its supervisor is gone."""

    @property
    def ended(self) -> bool:
        """Return whether the component has no process any more."""
        return self in (ComponentState.EXITED, ComponentState.FAILED, ComponentState.LOST)


class ProcessId(msgspec.Struct, frozen=True, kw_only=True):
    """Names one process for good: a pid alone is given away again.

    Attributes
    ----------
    host, boot_id:
        Machine, and which of its boots.
    pid, start_ticks:
        See `hpcrl.processes.procfs.Process`.
    """

    host: str
    boot_id: str
    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """Return the process that has ``pid`` on this machine now; None where there is none."""
        process = procfs.read_process(pid)
        if process is None:
            return None
        return cls(host=procfs.hostname(), boot_id=procfs.boot_id(), pid=pid, start_ticks=process.start_ticks)

    def alive(self) -> bool | None:
        """Return whether the process still runs; None where that is not visible from this machine."""
        if self.host != procfs.hostname():
            return None
        return self.boot_id == procfs.boot_id() and procfs.is_alive(self.pid, self.start_ticks)


class ReplicaJob(msgspec.Struct, frozen=True, kw_only=True):
    """Slurm job of one replica (layout ``elastic``), as the supervisor last observed it.

    Attributes
    ----------
    job_id:
        Id; None while it has none.
    state, reason:
        Slurm's values; empty where it has no job.
    replaced:
        Jobs of this replica that ended in this attempt and were replaced.
    lost:
        Description of the last loss of the replica, in a sentence; empty where there was none.
    """

    job_id: int | None = None
    state: str = ""
    reason: str = ""
    replaced: int = 0
    lost: str = ""


class ComponentStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Replica of a role.

    Attributes
    ----------
    state:
        State of its process.
    pid, guard_pid:
        PIDs of the role's process and of its guard; None before the start.
    host, port:
        Its address.
    nodes:
        Slurm's names of its nodes, in order; empty on this machine.
    started_at_s, ready_at_s, ended_at_s:
        Seconds since the epoch; None before that.
    exit_code, signal:
        Its end; one of the two.
    log:
        Log file, relative to the run directory.
    job:
        Its own job, where it has one.
    restarts:
        Number of restarts in this attempt.
    last_failure:
        End of its previous process; empty without a restart.
    progress:
        Its last reported or observed progress, in words; empty where it reports none.
    progress_at_s:
        Time of the last change of ``progress``, in seconds since the epoch.
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
    """Status of a run, as the supervisor writes it.

    Attributes
    ----------
    run_id:
        Id of the run, from its record.
    attempt:
        Number of the attempt.
    state, cause:
        State of the run; why it ended or is ending (None while it runs, and after success).
    supervisor:
        The process that wrote this.
    started_at_s, heartbeat_s, ended_at_s:
        Seconds since the epoch.
    components:
        All replicas of all roles.
    warnings:
        Problems that will end the run or hide its state unless a person acts: a sentence each.
    clocks:
        Offsets of the clocks of the attempt's nodes from the supervisor's; empty outside of Slurm.
    spare_nodes:
        Nodes of the job that no role uses (``job.spare_nodes``), in the order of their use.
    lost_nodes:
        Nodes of the job that are not used any more, with the reason of each.
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
    spare_nodes: list[str] = []
    lost_nodes: dict[str, str] = {}
    format_version: int = FORMAT_VERSION

    def encode(self) -> bytes:
        """Return the content of ``status.json``."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"

    def write(self, run: RunDir) -> None:
        """Replace ``status.json``."""
        atomic_write(run.status_path, self.encode())

    @classmethod
    def read(cls, run: RunDir) -> RunStatus | None:
        """Return the last status; None where no supervisor has written one yet.

        Raises
        ------
        RunDirError
            The file is damaged.
        """
        try:
            return msgspec.json.decode(run.status_path.read_bytes(), type=prepared(cls))
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as error:
            raise RunDirError(
                f"{run.status_path} cannot be read: {error}\n"
                "    hint: move it away; the next attempt of the run writes a new one"
            ) from error

    @classmethod
    def ready_since(cls, run: RunDir, attempt: int, role: str, replica: int) -> float | None:
        """Return since when the present process of a replica is ready, in seconds since the epoch.

        A different time means a different process. None where it is not ready, or that cannot be read now.
        """
        try:
            status = cls.read(run)
        except (OSError, RunDirError):
            return None
        if status is None or status.attempt != attempt:
            return None
        named = (c for c in status.components if (c.role, c.replica) == (role, replica))
        return next((c.ready_at_s for c in named if c.state is ComponentState.READY), None)

    def supervisor_alive(self, now_s: float) -> bool:
        """Return whether the supervisor still runs; on another machine, whether its heartbeat is recent."""
        alive = self.supervisor.alive()
        if alive is None:
            return now_s - self.heartbeat_s < _STALE_HEARTBEATS * HEARTBEAT_S
        return alive
