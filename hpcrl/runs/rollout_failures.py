"""Rollouts that failed: how many, of which environment, for what, and the first of each kind.

The orchestrator replaces ``attempts/NNNN/rollout_failures.json`` every few seconds. Readers add up the attempts of a
run. A run of an earlier version has no such file: of it the counters in its step records say how many there were.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

import msgspec

from hpcrl.decoding import prepared
from hpcrl.runs.rundir import RunDir

__all__ = [
    "WARN_SHARE",
    "EnvironmentFailures",
    "FailureCause",
    "FirstFailure",
    "RolloutFailures",
    "failures_of_counters",
    "failures_path",
    "read_failures",
]

WARN_SHARE = 0.02
"""From this share of failed rollouts on people are warned."""


class FailureCause(StrEnum):
    """Why a rollout ended without a reward."""

    RAISED = "raised"
    """The environment's code raised an exception."""
    UNUSABLE = "unusable"
    """The environment gave a reward that is no finite number."""
    TIMEOUT = "timeout"
    """The environment gave no answer in time."""
    LOST = "lost"
    """The environment's process died, or was ended because it hung."""
    NO_ROOM = "no_room"
    """The prompt left no room for an answer."""
    ENGINE = "engine"
    """No engine answered after the last retry."""
    TEACHER = "teacher"
    """The teacher gave no log-probabilities that could be used (``algorithm.distillation``)."""
    ENVIRONMENT = "environment"
    """Any of those of the environment: an earlier version did not tell them apart."""

    @property
    def words(self) -> str:
        """Say it for people, behind a number of rollouts."""
        return _WORDS[self]


_WORDS = {
    FailureCause.RAISED: "raised an exception",
    FailureCause.UNUSABLE: "gave an unusable reward",
    FailureCause.TIMEOUT: "timed out",
    FailureCause.LOST: "lost their process",
    FailureCause.NO_ROOM: "had no room for an answer",
    FailureCause.ENGINE: "got no answer of an engine",
    FailureCause.TEACHER: "got no log-probabilities of the teacher",
    FailureCause.ENVIRONMENT: "failed in the environment",
}


class FirstFailure(msgspec.Struct, frozen=True, kw_only=True):
    """The first failure of a kind.

    Attributes
    ----------
    time_s:
        When, in seconds since the epoch.
    what:
        The exception and its message, in one line.
    where:
        The innermost frame of the environment's own code, ``file:line in function``; empty where none is known.
    """

    time_s: float
    what: str
    where: str = ""


class EnvironmentFailures(msgspec.Struct, frozen=True, kw_only=True):
    """Training rollouts of one environment.

    Attributes
    ----------
    environment:
        Its name; empty where the counts are of all environments together.
    started, finished:
        Rollouts that began, and that ended with a reward.
    failed:
        Rollouts that ended without one, by `FailureCause`.
    first:
        The first failure of each cause.
    refused_parts:
        How often a part of a reward was left out because it is no finite number, by name of the part.
    first_refused:
        What the first of them was.
    """

    environment: str
    started: int = 0
    finished: int = 0
    failed: dict[str, int] = {}
    first: dict[str, FirstFailure] = {}
    refused_parts: dict[str, int] = {}
    first_refused: dict[str, str] = {}

    @property
    def total(self) -> int:
        """Rollouts that failed."""
        return sum(self.failed.values())

    @property
    def share(self) -> float:
        """Failed rollouts as a share of those that began; 0 where none did.

        Those that run still count as good: rollouts that fail often fail fast, and of those that have ended at the
        beginning of a run most have failed.
        """
        return self.total / max(1, self.started, self.total + self.finished)

    @property
    def warns(self) -> bool:
        """Whether people are warned."""
        return self.total > 0 and self.share >= WARN_SHARE

    def plus(self, later: EnvironmentFailures) -> EnvironmentFailures:
        """Add what a later attempt counted."""
        return EnvironmentFailures(
            environment=self.environment,
            started=self.started + later.started,
            finished=self.finished + later.finished,
            failed=_sum(self.failed, later.failed),
            first={**later.first, **self.first},
            refused_parts=_sum(self.refused_parts, later.refused_parts),
            first_refused={**later.first_refused, **self.first_refused},
        )


def _sum(a: Mapping[str, int], b: Mapping[str, int]) -> dict[str, int]:
    return {name: a.get(name, 0) + b.get(name, 0) for name in [*a, *(name for name in b if name not in a)]}


class RolloutFailures(msgspec.Struct, frozen=True, kw_only=True):
    """The file of one attempt.

    Attributes
    ----------
    time_s:
        When it was written, in seconds since the epoch.
    environments:
        Each environment of which a rollout began.
    """

    time_s: float
    environments: list[EnvironmentFailures] = []


def failures_path(run: RunDir, attempt: int) -> Path:
    """Return the file of one attempt."""
    return run.attempt_dir(attempt) / "rollout_failures.json"


def read_failures(run: RunDir) -> list[EnvironmentFailures]:
    """Read the rollouts of a run by environment, all attempts together; empty where no attempt has said anything."""
    found: dict[str, EnvironmentFailures] = {}
    for attempt in run.attempts():
        try:
            data = failures_path(run, attempt).read_bytes()
            said = msgspec.json.decode(data, type=prepared(RolloutFailures))
        except (OSError, msgspec.DecodeError):
            continue
        for each in said.environments:
            known = found.get(each.environment)
            found[each.environment] = each if known is None else known.plus(each)
    return list(found.values())


def failures_of_counters(counters: Mapping[str, float]) -> list[EnvironmentFailures]:
    """Say what the orchestrator's counters in a step record tell: all environments together, without exceptions."""
    failed = {
        cause.value: int(counters.get(name, 0))
        for cause, name in ((FailureCause.ENVIRONMENT, "dropped_environment"), (FailureCause.ENGINE, "dropped_engine"))
        if counters.get(name, 0) > 0
    }
    if not failed:
        return []
    started, finished = int(counters.get("started", 0)), int(counters.get("finished", 0))
    return [EnvironmentFailures(environment="", started=started, finished=finished, failed=failed)]
