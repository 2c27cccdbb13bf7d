"""How each engine replica of a run is: one word for what supervisor and orchestrator know of it.

The supervisor says whether its process lives and is ready (``status.json``). The orchestrator says whether it answers,
samples, and serves the newest weights: in ``attempts/NNNN/fleet.json``, which it replaces every few seconds. A file,
because who asks for the status may not reach the orchestrator's port, and must not wait for it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import msgspec

from hpcrl.decoding import prepared
from hpcrl.fs import atomic_write
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ComponentState, ComponentStatus

__all__ = ["EngineView", "Fleet", "FleetView", "Replica", "ReplicaState", "judge", "read_fleet"]

_FRESH_S = 15.0
"""A view that is older says nothing about now (it is written every two seconds; clocks and NFS may lag)."""
_ENGINE_ROLES = ("engine", "prefill", "decode")


class ReplicaState(StrEnum):
    """How an engine replica is."""

    STARTING = "starting"
    """Its process starts, or it has no weights yet."""
    HEALTHY = "healthy"
    """It answers, and serves the newest weights or is loading them."""
    SUSPECT = "suspect"
    """It does not answer, or samples nothing though it has requests. It gets nothing new."""
    STALE = "stale"
    """It serves an older version than the newest and is not loading that one. Behind a router it gets nothing new."""
    RESTARTING = "restarting"
    """It failed or hung, and is started again; until it has the newest weights."""
    DEAD = "dead"
    """It has no process, and gets none."""
    UNKNOWN = "unknown"
    """Its process is ready, and the orchestrator has not said anything about it lately."""


class EngineView(msgspec.Struct, frozen=True, kw_only=True):
    """One engine as the orchestrator knows it. None: not known now.

    Attributes
    ----------
    role, replica:
        Which it is.
    version, loading:
        Policy version that it serves (-1: none), and that it is being brought to.
    answers:
        Whether it answers, as far as is known; a replica of several servers where all of them do.
    servers:
        How many it has; what follows is of all of them together.
    silent_rank:
        Of several, the one that makes it ``stuck``.
    updating:
        Its weights change just now, or it has none: it need not sample.
    quiet_s:
        Seconds with requests since it computed something last.
    stuck:
        That is too long.
    why:
        What was wrong with it last; empty where nothing was.
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
        Tokens sampled, since the look before.
    preemptions:
        Requests that had to give their KV back, since it was started.
    window:
        Rollouts that it gets at once by the adaptive limit; None where that is off.
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


class FleetView(msgspec.Struct, frozen=True, kw_only=True):
    """All engines of an attempt as the orchestrator knows them.

    Attributes
    ----------
    time_s:
        When it was written, in seconds since the epoch.
    newest:
        Newest version that is published; None before the first.
    in_flight, limit:
        Rollouts in flight, and how many may be: the recipe's bound, or the adaptive one.
    router:
        Whether there is a router and it answers; None without one.
    """

    time_s: float
    newest: int | None
    in_flight: int
    limit: int
    router: bool | None = None
    engines: list[EngineView] = []

    @staticmethod
    def path(run: RunDir, attempt: int) -> Path:
        return run.attempt_dir(attempt) / "fleet.json"

    def write(self, run: RunDir, attempt: int) -> None:
        """Replace the file. It is not synchronised to disk: after a crash of the machine nobody asks for it."""
        atomic_write(self.path(run, attempt), msgspec.json.encode(self), durable=False)

    @classmethod
    def read(cls, run: RunDir, attempt: int) -> FleetView | None:
        """What the file says; None where there is none, it cannot be read, or it is too old to say anything."""
        try:
            view = msgspec.json.decode(cls.path(run, attempt).read_bytes(), type=prepared(cls))
        except (OSError, msgspec.DecodeError):
            return None
        return view if time.time() - view.time_s < _FRESH_S else None

    def engine(self, replica: int, role: str = "engine") -> EngineView | None:
        """One engine; None where the orchestrator does not have it."""
        return next((engine for engine in self.engines if (engine.role, engine.replica) == (role, replica)), None)


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """One engine replica, judged.

    Attributes
    ----------
    why:
        More than the state says; may be empty.
    view:
        What the orchestrator says; None where that is not known.
    """

    role: str
    replica: int
    state: ReplicaState
    why: str = ""
    view: EngineView | None = None


class Fleet(NamedTuple):
    """The engines of a run.

    Attributes
    ----------
    view:
        What the orchestrator says; None where it says nothing, or did so too long ago.
    replicas:
        Each of them, judged.
    """

    view: FleetView | None
    replicas: list[Replica]


def read_fleet(run: RunDir, attempt: int, components: Sequence[ComponentStatus]) -> Fleet:
    """The engines of an attempt now. Nobody is asked: two files are read, of which the caller has one.

    Parameters
    ----------
    attempt:
        0 before the first: then there is no view of the orchestrator's.
    components:
        All of the attempt, of its ``status.json``; those that are no engines are passed over.
    """
    view = FleetView.read(run, attempt) if attempt else None
    newest = None if view is None else view.newest
    found = []
    for component in components:
        if component.role in _ENGINE_ROLES:
            engine = None if view is None else view.engine(component.replica, component.role)
            state, why = judge(component, engine, newest)
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


def judge(component: ComponentStatus, view: EngineView | None, newest: int | None) -> tuple[ReplicaState, str]:
    """How a replica is, and why.

    Parameters
    ----------
    component:
        What the supervisor says.
    view:
        What the orchestrator says; None where it is not known, or old.
    newest:
        Newest version that is published.
    """
    beginning = ReplicaState.RESTARTING if component.restarts else ReplicaState.STARTING
    state = _BY_PROCESS.get(component.state)
    if state is ReplicaState.DEAD:
        return state, component.state.value.lower()
    if state is not None:
        return (beginning if state is ReplicaState.STARTING else state), component.last_failure
    if view is None:
        return ReplicaState.UNKNOWN, "the orchestrator says nothing about it"
    return _by_work(view, newest, beginning)


def _by_work(view: EngineView, newest: int | None, beginning: ReplicaState) -> tuple[ReplicaState, str]:
    """How a replica is whose process is ready."""
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
