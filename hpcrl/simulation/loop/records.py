"""Rollouts and groups as the simulation moves them."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, IntEnum
from typing import Protocol

from hpcrl.simulation.inputs.durations import TurnPlan


class Outcome(Enum):
    """End of a rollout. Each rollout ends once."""

    CONSUMED = "consumed"
    """In a batch of a step that was kept."""
    DROPPED_STALE = "dropped_stale"
    """Finished, but too old to be used."""
    DROPPED_ZERO_VARIANCE = "dropped_zero_variance"
    """Finished in a group without variance, where the recipe drops these."""
    DROPPED_GROUP = "dropped_group"
    """Finished, but too few members of the group did."""
    DROPPED_ENVIRONMENT = "dropped_environment"
    """Ended without a reward."""
    CANCELLED_STALE = "cancelled_stale"
    """Aborted in flight, because it could not have been used any more."""
    LOST_FAILURE = "lost_failure"
    """Taken by a node failure: in flight, or finished or consumed after the last checkpoint."""


class Place(IntEnum):
    """Place of the KV of a rollout."""

    NOWHERE = 0
    QUEUED = 1
    PREFILL = 2
    DECODE = 3
    CACHED = 4


class Replica(Protocol):
    """Interface of an engine to the rollouts that it serves.

    Attributes
    ----------
    index:
        Number of the replica.
    version:
        Policy version that it serves; -1 before the first.
    load:
        Assigned rollouts that have not ended.
    loading:
        The version that it loads, or None. New rollouts wait in ``gate`` meanwhile.
    """

    index: int
    version: int
    load: int
    loading: int | None
    gate: list[Rollout]

    def submit(self, rollout: Rollout, *, computed: bool = False) -> None:
        """Queue the rollout's request; its prompt is ``computed`` where a prefill engine has done it."""

    def abort(self, rollout: Rollout) -> None:
        """Take the rollout away from wherever it is."""

    def release(self, rollout: Rollout) -> None:
        """Keep the KV of an answered request as cache."""


class Group:
    """The rollouts of one prompt, on one engine.

    Attributes
    ----------
    members:
        Its rollouts, without those that failed.
    running:
        Number of them that run.
    prefilled:
        Prompt tokens that the engine's prefix cache has for its members.
    outcome:
        Outcome of the members; None while they run or wait to be consumed.
    """

    __slots__ = ("environment", "index", "members", "outcome", "prefilled", "running", "without_variance")

    def __init__(self, index: int, environment: int) -> None:
        self.index, self.environment = index, environment
        self.members: list[Rollout] = []
        self.running = self.prefilled = 0
        self.without_variance = False
        self.outcome: Outcome | None = None

    @property
    def version(self) -> int | None:
        """Return the version of the oldest first token so far; None while no member has sampled one."""
        return min((m.first_version for m in self.members if m.first_version is not None), default=None)


class Rollout:
    """Trajectory, with its request that is at an engine.

    Attributes
    ----------
    turns, turn:
        The requests, and which one is next or running.
    engine:
        Engine that serves it.
    context:
        Tokens before the answer of the running request; after it, all tokens so far.
    prefill:
        Those of them that must still be computed.
    remaining:
        Tokens that it will still say in this request.
    left:
        Tokens of sequences that it has left for branches: they are trained as well.
    sampled_tokens:
        Tokens that were sampled so far, the running request included.
    started_s, ended_s:
        Times of its start, and of its reward.
    alive:
        False as soon as it has ended: later calls mean nothing.
    heldout:
        Belongs to an evaluation.
    stamp:
        Changes when the rollout is taken from a queue: older entries mean nothing then.
    """

    __slots__ = (
        "alive",
        "context",
        "ended_s",
        "engine",
        "first_version",
        "group",
        "heldout",
        "judge_s",
        "left",
        "place",
        "prefill",
        "remaining",
        "sampled_tokens",
        "stamp",
        "started_s",
        "turn",
        "turns",
        "v_end",
        "v_start",
    )

    def __init__(self, group: Group, turns: Sequence[TurnPlan], judge_s: float, engine: Replica) -> None:
        self.group, self.turns, self.judge_s, self.engine = group, turns, judge_s, engine
        self.turn = self.stamp = self.sampled_tokens = 0
        self.first_version: int | None = None
        self.place = Place.NOWHERE
        self.alive = True
        self.heldout = False
        self.context = self.left = self.remaining = 0
        self.started_s = self.ended_s = 0.0
        self.prefill = self.v_start = self.v_end = 0.0
