"""State of each engine replica of a run: one word for what supervisor and orchestrator know of it.

The supervisor writes whether its process runs and is ready (``status.json``). The orchestrator writes whether it
answers, samples, and serves the newest weights, in ``attempts/NNNN/fleet.json``, which it replaces every few seconds.
This is a file, because the reader of the status may be unable to reach the orchestrator's port, and must not wait for
it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import msgspec

from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ComponentState, ComponentStatus
from hpcrl.storage.files import atomic_write
from hpcrl.storage.msgspec_types import prepared

_FRESH_S = 15.0
"""Maximum age in seconds of a usable view (it is written every two seconds; clocks and NFS may lag)."""
_ENGINE_ROLES = ("engine", "prefill", "decode")


class ReplicaState(StrEnum):
    """State of an engine replica."""

    STARTING = "starting"
    """Its process starts, or it has no weights yet."""
    HEALTHY = "healthy"
    """It answers, and serves the newest weights or is loading them."""
    SUSPECT = "suspect"
    """It does not answer, or samples nothing though it has requests. It gets nothing new."""
    STALE = "stale"
    """It serves an older version than the newest and is not loading that one. Behind a router it gets nothing new."""
    RESTARTING = "restarting"
    """It failed or hung, and is being restarted, until it has the newest weights."""
    DEAD = "dead"
    """It has no process, and will not be restarted."""
    UNKNOWN = "unknown"
    """Its process is ready, and the orchestrator's view of it is missing or out of date."""


class EngineView(msgspec.Struct, frozen=True, kw_only=True):
    """One engine as the orchestrator knows it. None: unknown now.

    Attributes
    ----------
    role, replica:
        Role and replica of the engine.
    version, loading:
        Policy version that it serves (-1: none), and that it is loading.
    answers:
        Whether it answers, as far as is known; for a replica of several servers, whether all do.
    servers:
        Number of its servers; the following fields are about all of them together.
    silent_rank:
        Rank of the server that makes a replica of several servers ``stuck``.
    updating:
        Its weights change now, or it has none: it need not sample.
    quiet_s:
        Seconds with requests since it computed something last.
    stuck:
        Whether ``quiet_s`` is too long.
    why:
        Its last problem; empty where there was none.
    in_flight:
        Requests that the router has sent there and that were not answered; without a router, rollouts assigned to it.
    routed:
        Whether the router may choose it; None without a router.
    running, waiting:
        Requests in its batch, and in its queue.
    kv_usage:
        Share of its KV cache in use, from 0 to 1.
    prefix_hit_rate:
        Share of prompt tokens that it found in its cache, since it was started.
    tokens_per_s:
        Tokens sampled per second since the previous look.
    preemptions:
        Requests whose KV cache was taken away (preempted), since it was started.
    window:
        Maximum number of concurrent rollouts by the adaptive limit; None where that is off.
    """

    role: str = "engine"
    replica: int
    version: int
    loading: int | None = None
    answers: bool = True
    servers: int = 1
    silent_rank: int | None = None
    updating: bool = False
    quiet_s: float = 0.0
    stuck: bool = False
    why: str = ""
    in_flight: int = 0
    routed: bool | None = None
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    prefix_hit_rate: float | None = None
    tokens_per_s: float | None = None
    preemptions: int | None = None
    window: float | None = None


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """One worker of environments as the orchestrator knows it.

    Attributes
    ----------
    replica:
        Number of the worker.
    up:
        Whether it is there, and its environments are.
    calls:
        Rollouts, and prompts that were asked for, that it works on.
    losses:
        How often it was lost in this attempt.
    """

    replica: int
    up: bool
    calls: int = 0
    losses: int = 0


class FleetView(msgspec.Struct, frozen=True, kw_only=True):
    """All engines, and workers of environments, of an attempt as the orchestrator knows them.

    Attributes
    ----------
    time_s:
        Time of writing, in seconds since the epoch.
    newest:
        Newest version that engines can have; None before the first.
    durable:
        With ``handoff.transport: fabric``: newest version in the store, to which ``newest`` need not belong.
    in_flight, limit:
        Rollouts in flight, and how many may be: the recipe's bound, or the adaptive one.
    router:
        Whether there is a router and it answers; None without one.
    weights:
        With ``handoff.transport: fabric``: ``fabric_bytes``, ``node_bytes`` and ``share_bytes`` that engines have read,
        ``fabric_s`` and ``fabric_failures``, since the start of the orchestrator. None: not counted.
    """

    time_s: float
    newest: int | None
    in_flight: int
    limit: int
    router: bool | None = None
    weights: dict[str, float] | None = None
    engines: list[EngineView] = []
    workers: list[WorkerView] = []
    durable: int | None = None

    @staticmethod
    def path(run: RunDir, attempt: int) -> Path:
        return run.attempt_dir(attempt) / "fleet.json"

    def write(self, run: RunDir, attempt: int) -> None:
        """Replace the file, without synchronising it to disk: it is not needed after a crash of the machine."""
        atomic_write(self.path(run, attempt), msgspec.json.encode(self), durable=False)

    @classmethod
    def read(cls, run: RunDir, attempt: int) -> FleetView | None:
        """Return the content of the file; None where it does not exist, cannot be read, or is out of date."""
        try:
            view = msgspec.json.decode(cls.path(run, attempt).read_bytes(), type=prepared(cls))
        except (OSError, msgspec.DecodeError):
            return None
        return view if time.time() - view.time_s < _FRESH_S else None

    def engine(self, replica: int, role: str = "engine") -> EngineView | None:
        """Return one engine; None where the orchestrator does not have it."""
        return next((engine for engine in self.engines if (engine.role, engine.replica) == (role, replica)), None)


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """Engine replica and its state.

    Attributes
    ----------
    why:
        Further explanation of the state; may be empty.
    view:
        View of the orchestrator; None where it is unknown.
    """

    role: str
    replica: int
    state: ReplicaState
    why: str = ""
    view: EngineView | None = None


class Fleet(NamedTuple):
    """Engines of a run.

    Attributes
    ----------
    view:
        View of the orchestrator; None where it is missing or out of date.
    replicas:
        Replicas with their states.
    """

    view: FleetView | None
    replicas: list[Replica]


def read_fleet(run: RunDir, attempt: int, components: Sequence[ComponentStatus]) -> Fleet:
    """Return the engines of an attempt now, from two files, of which the caller has one; no process is asked.

    Parameters
    ----------
    attempt:
        0 before the first attempt: then the orchestrator has written no view.
    components:
        All components in the ``status.json`` of the attempt; those that are not engines are ignored.
    """
    view = FleetView.read(run, attempt) if attempt else None
    newest = None if view is None else view.newest
    found = []
    for component in components:
        if component.role in _ENGINE_ROLES:
            engine = None if view is None else view.engine(component.replica, component.role)
            state, why = judge_replica(component, engine, newest)
            found.append(Replica(role=component.role, replica=component.replica, state=state, why=why, view=engine))
    return Fleet(view, found)


_BY_PROCESS = {
    ComponentState.PENDING: ReplicaState.STARTING,
    ComponentState.STARTING: ReplicaState.STARTING,
    ComponentState.RESTARTING: ReplicaState.RESTARTING,
    ComponentState.STOPPING: ReplicaState.DEAD,
    ComponentState.EXITED: ReplicaState.DEAD,
    ComponentState.FAILED: ReplicaState.DEAD,
    ComponentState.LOST: ReplicaState.DEAD,
}


def judge_replica(component: ComponentStatus, view: EngineView | None, newest: int | None) -> tuple[ReplicaState, str]:
    """Return the state of a replica and the reason for it.

    Parameters
    ----------
    component:
        Status by the supervisor.
    view:
        View of the orchestrator; None where it is unknown or out of date.
    newest:
        Newest published version.
    """
    beginning = ReplicaState.RESTARTING if component.restarts else ReplicaState.STARTING
    state = _BY_PROCESS.get(component.state)
    if state is ReplicaState.DEAD:
        return state, component.state.value.lower()
    if state is not None:
        return (beginning if state is ReplicaState.STARTING else state), component.last_failure
    if view is None:
        return ReplicaState.UNKNOWN, "the orchestrator does not report it"
    return _by_work(view, newest, beginning)


def _by_work(view: EngineView, newest: int | None, beginning: ReplicaState) -> tuple[ReplicaState, str]:
    """Return the state, and its reason, of a replica whose process is ready."""
    if not view.answers:
        return ReplicaState.SUSPECT, view.why or "it does not answer"
    if view.stuck and view.silent_rank is not None:
        return ReplicaState.SUSPECT, f"no token of rank {view.silent_rank} of {view.servers} for {view.quiet_s:.0f} s"
    if view.stuck:
        return ReplicaState.SUSPECT, f"no token for {view.quiet_s:.0f} s, with {view.running} requests"
    if view.version < 0:
        return beginning, "it has no weights yet" if view.loading is None else f"loads version {view.loading}"
    if newest is not None and view.version < newest and (view.loading is None or view.routed is False):
        return ReplicaState.STALE, view.why or f"version {newest} is published"
    return ReplicaState.HEALTHY, ""
