"""Rollouts that failed: how many, of which environment, for what, and the first of each kind.

The orchestrator replaces ``attempts/NNNN/rollout_failures.json`` every few seconds. Readers add up the attempts of a
run. A run of an earlier version has no such file: of it the counters in its step records say how many there were.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

import msgspec

from hpcrl.runs.rundir import RunDir
from hpcrl.storage.msgspec_types import prepared

WARN_SHARE = 0.02
"""Minimum share of failed rollouts for a warning."""


class FailureCause(StrEnum):
    """Cause of the end of a rollout without a reward."""

    RAISED = "raised"
    """The environment's code raised an exception."""
    UNUSABLE = "unusable"
    """The environment gave a reward that is not a finite number."""
    TIMEOUT = "timeout"
    """The environment did not answer in time."""
    LOST = "lost"
    """The environment's process died, or was ended because it hung."""
    EVICTED = "evicted"
    """Its sandbox was ended, because all sandboxes of the node together used too much memory."""
    NO_ROOM = "no_room"
    """The prompt left no room for an answer."""
    BRANCHES = "branches"
    """The rollout would have had more sequences than ``rollouts.max_branches``."""
    ENGINE = "engine"
    """No engine answered after the last retry."""
    TEACHER = "teacher"
    """The teacher gave no log-probabilities that could be used (``algorithm.distillation``)."""
    ENVIRONMENT = "environment"
    """Any failure of the environment, in records of earlier versions, which did not distinguish them."""

    @property
    def words(self) -> str:
        """Return the cause as text for people, to follow a number of rollouts."""
        return _WORDS[self]


_WORDS = {
    FailureCause.RAISED: "raised an exception",
    FailureCause.UNUSABLE: "gave an unusable reward",
    FailureCause.TIMEOUT: "timed out",
    FailureCause.LOST: "lost their process",
    FailureCause.EVICTED: "lost their sandbox to the memory limit of all sandboxes",
    FailureCause.NO_ROOM: "had no room for an answer",
    FailureCause.BRANCHES: "had too many branches",
    FailureCause.ENGINE: "got no answer of an engine",
    FailureCause.TEACHER: "got no log-probabilities of the teacher",
    FailureCause.ENVIRONMENT: "failed in the environment",
}


class FirstFailure(msgspec.Struct, frozen=True, kw_only=True):
    """First failure of a kind.

    Attributes
    ----------
    time_s:
        Time in seconds since the epoch.
    what:
        Exception and its message, in one line.
    where:
        Innermost frame of the environment's own code, ``file:line in function``; empty where none is known.
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
        Number of parts of rewards left out because they are not finite numbers, by name of the part.
    first_refused:
        Value of the first of them.
    tampered:
        Finished rollouts that interfered with their judge.
    """

    environment: str
    started: int = 0
    finished: int = 0
    failed: dict[str, int] = {}
    first: dict[str, FirstFailure] = {}
    refused_parts: dict[str, int] = {}
    first_refused: dict[str, str] = {}
    tampered: int = 0

    @property
    def total(self) -> int:
        """Return the number of failed rollouts."""
        return sum(self.failed.values())

    @property
    def share(self) -> float:
        """Return failed rollouts as a share of those that began; 0 where none did.

        Running rollouts count as good: failures are often fast, so that most of the rollouts that end first in a run
        have failed.
        """
        return self.total / max(1, self.started, self.total + self.finished)

    @property
    def warns(self) -> bool:
        """Return whether the share of failures is high enough for a warning."""
        return self.total > 0 and self.share >= WARN_SHARE

    def plus(self, later: EnvironmentFailures) -> EnvironmentFailures:
        """Return the sum with the counts of a later attempt."""
        return EnvironmentFailures(
            environment=self.environment,
            started=self.started + later.started,
            finished=self.finished + later.finished,
            failed=_sum(self.failed, later.failed),
            first={**later.first, **self.first},
            refused_parts=_sum(self.refused_parts, later.refused_parts),
            first_refused={**later.first_refused, **self.first_refused},
            tampered=self.tampered + later.tampered,
        )


def _sum(a: Mapping[str, int], b: Mapping[str, int]) -> dict[str, int]:
    return {name: a.get(name, 0) + b.get(name, 0) for name in [*a, *(name for name in b if name not in a)]}


class RolloutFailures(msgspec.Struct, frozen=True, kw_only=True):
    """File of the failures of one attempt.

    Attributes
    ----------
    time_s:
        Time of writing, in seconds since the epoch.
    environments:
        Environments of which a rollout began.
    """

    time_s: float
    environments: list[EnvironmentFailures] = []


def failures_path(run: RunDir, attempt: int) -> Path:
    """Return the file of one attempt."""
    return run.attempt_dir(attempt) / "rollout_failures.json"


def read_failures(run: RunDir) -> list[EnvironmentFailures]:
    """Return the failures of a run by environment, all attempts together; empty where no attempt has a report."""
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
    """Return the failures in the counters of a step record: all environments together, without exceptions."""
    failed = {
        cause.value: int(counters.get(name, 0))
        for cause, name in ((FailureCause.ENVIRONMENT, "dropped_environment"), (FailureCause.ENGINE, "dropped_engine"))
        if counters.get(name, 0) > 0
    }
    if not failed:
        return []
    started, finished = int(counters.get("started", 0)), int(counters.get("finished", 0))
    return [EnvironmentFailures(environment="", started=started, finished=finished, failed=failed)]
