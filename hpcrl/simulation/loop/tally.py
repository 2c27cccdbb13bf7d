"""Counts of a simulation while it runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hpcrl.simulation.loop.records import Group, Outcome


@dataclass(slots=True)
class StepSample:
    """Measurements of one optimizer step.

    Attributes
    ----------
    end_s:
        Simulated seconds at its end.
    phases_s:
        Seconds by phase, as in `hpcrl.runs.metrics.StepRecord`.
    staleness:
        Rollouts by staleness.
    """

    step: int
    end_s: float
    phases_s: dict[str, float]
    staleness: Counter[int]
    tokens: int
    sampled_tokens: int

    @property
    def seconds(self) -> float:
        """Return the seconds of the whole step."""
        return sum(self.phases_s.values())

    @property
    def staleness_mean(self) -> float:
        """Return the mean staleness of the step's rollouts."""
        return sum(lag * count for lag, count in self.staleness.items()) / self.staleness.total()


@dataclass(slots=True)
class KvSample:
    """All engines at one moment: shares of the KV capacity, and sequences."""

    time_s: float
    mean: float
    highest: float
    running: float
    waiting: float


@dataclass(slots=True)
class LostTime:
    """One node failure."""

    time_s: float
    lost_steps: int
    lost_s: float
    """Seconds since the checkpoint that the next attempt begins with."""
    down_s: float
    """Seconds until rollouts begin again."""
    replaced: bool = False
    """A spare node took the place of the lost one."""


@dataclass(slots=True)
class Tally:
    """Counts of one simulation.

    Attributes
    ----------
    started:
        Rollouts, evaluations excluded.
    outcomes:
        Rollouts by how they ended. Started rollouts that are in none of these run or wait to be consumed.
    steps:
        Kept steps; those that a failure took are gone from here.
    """

    started: int = 0
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    steps: list[StepSample] = field(default_factory=list)
    kv: list[KvSample] = field(default_factory=list)
    failures: list[LostTime] = field(default_factory=list)
    requests: int = 0
    evaluations: int = 0
    checkpoints: int = 0
    rollout_s: list[float] = field(default_factory=list)

    def end(self, outcome: Outcome) -> None:
        """Count the end of a rollout whose group continues."""
        self.outcomes[outcome] += 1

    def end_group(self, group: Group, outcome: Outcome | None) -> None:
        """Record the outcome of all finished rollouts of a group; a restore may take it back (None) or change it."""
        if group.outcome is not None:
            self.outcomes[group.outcome] -= len(group.members)
        group.outcome = outcome
        if outcome is not None:
            self.outcomes[outcome] += len(group.members)
