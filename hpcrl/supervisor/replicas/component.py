"""One replica of a role, as a state machine."""

from __future__ import annotations

import time
from collections.abc import Callable

from hpcrl.config.plan import Role, RoleGroup
from hpcrl.runs.cause import Cause
from hpcrl.runs.status import ComponentState, ComponentStatus, ReplicaJob
from hpcrl.supervisor.launch.replica_launcher import Address
from hpcrl.supervisor.process.guarded import End, RunningProcess
from hpcrl.supervisor.replicas.restarts import Restarts

_S = ComponentState
_NEXT: dict[ComponentState, frozenset[ComponentState]] = {
    # a replica that never started leaves PENDING for EXITED when the run ends
    _S.PENDING: frozenset({_S.STARTING, _S.EXITED}),
    _S.STARTING: frozenset({_S.READY, _S.STOPPING, _S.EXITED, _S.FAILED, _S.RESTARTING}),
    _S.READY: frozenset({_S.STOPPING, _S.EXITED, _S.FAILED, _S.RESTARTING}),
    _S.RESTARTING: frozenset({_S.STARTING, _S.EXITED, _S.FAILED}),
    _S.STOPPING: frozenset({_S.EXITED}),
    _S.EXITED: frozenset(),
    _S.FAILED: frozenset(),
}


class Component:
    """State, process and times of one replica.

    Parameters
    ----------
    group, replica:
        Role and number of the replica.
    address:
        Address at which it listens.
    log:
        Path of its log file, relative to the run directory.
    on_change:
        Called after every change of state.
    """

    def __init__(
        self, group: RoleGroup, replica: int, *, address: Address, log: str, on_change: Callable[[Component], None]
    ) -> None:
        self.group, self.replica, self.address, self.log = group, replica, address, log
        self.state = ComponentState.PENDING
        self.process: RunningProcess | None = None
        self.pid: int | None = None
        self.end: End | None = None
        self.started_at_s: float | None = None
        self.ready_at_s: float | None = None
        self.stop_asked_at_s: float | None = None
        self.job: ReplicaJob | None = None
        self.restarts = Restarts(group.policy)
        self.verdict: Cause | None = None
        """Cause for which the supervisor itself ends the process: it hangs, or does not load weights."""
        self.given_up = False
        self.progress = ""
        self.progress_at_s: float | None = None
        self._on_change = on_change

    @property
    def role(self) -> Role:
        return self.group.role

    @property
    def label(self) -> str:
        """Return ``<role> <replica>``, for messages."""
        return f"{self.role} {self.replica}"

    def enter(self, state: ComponentState) -> None:
        """Change state; a transition that the table has not is a bug of the supervisor."""
        assert state in _NEXT[self.state], f"{self.label}: {self.state} -> {state}"
        self.state = state
        self._on_change(self)

    def starting(self, process: RunningProcess) -> None:
        """Note that its guard runs."""
        self.process, self.started_at_s = process, time.time()
        self.end, self.pid, self.verdict = None, None, None
        self.enter(ComponentState.STARTING)

    def restarting(self) -> None:
        """Enter the state of a replica whose process has ended and that starts again after a pause."""
        self.ready_at_s, self.progress, self.progress_at_s = None, "", None
        self.enter(ComponentState.RESTARTING)

    def lost(self) -> None:
        """Mark the replica as lost: it is not started again. The run continues without it, or ends."""
        self.given_up = True
        if self.state is not ComponentState.FAILED:
            self.enter(ComponentState.FAILED)

    @property
    def lives_since_s(self) -> float:
        """Return when the current process began, in seconds since the epoch; older reports are of an earlier one."""
        return self.started_at_s or 0.0

    def ready(self) -> None:
        """Note that its probe succeeded."""
        self.ready_at_s = time.time()
        self.enter(ComponentState.READY)

    def ask_to_stop(self, grace_s: float) -> None:
        """Send SIGTERM now and SIGKILL after the grace period; do nothing if the process has ended already."""
        if self.process is None or self.state is ComponentState.RESTARTING:
            if self.state in (ComponentState.PENDING, ComponentState.RESTARTING):
                self.enter(ComponentState.EXITED)
            return
        # also if the role has ended: its remaining processes get no more than this grace
        self.process.stop(grace_s)
        if not self.state.ended and self.state is not ComponentState.STOPPING:
            self.stop_asked_at_s = time.time()
            self.enter(ComponentState.STOPPING)

    def ended(self, end: End, *, as_it_should: bool) -> None:
        """Record the end of the process."""
        self.end = end
        if self.state is ComponentState.STOPPING or as_it_should:
            self.enter(ComponentState.EXITED)
        else:
            self.enter(ComponentState.FAILED)

    def status(self) -> ComponentStatus:
        """Return the component's entry of ``status.json``."""
        return ComponentStatus(
            role=self.role.value,
            replica=self.replica,
            state=self.state,
            pid=self.pid,
            guard_pid=None if self.process is None else self.process.guard_pid,
            host=self.address.host,
            port=self.address.port,
            nodes=list(self.address.nodes),
            started_at_s=self.started_at_s,
            ready_at_s=self.ready_at_s,
            ended_at_s=None if self.end is None else self.end.time_s,
            exit_code=None if self.end is None else self.end.exit_code,
            signal=None if self.end is None else self.end.signal,
            log=self.log,
            job=self.job,
            restarts=self.restarts.count,
            last_failure=self.restarts.last_failure,
            progress=self.progress,
            progress_at_s=self.progress_at_s,
        )
