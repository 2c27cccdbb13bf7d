"""Count rollouts that fail: one is an accident, many one after the other or a large share of them end the run."""

from __future__ import annotations

import collections
import logging
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from hpcrl.config.rollouts import RolloutFailuresConfig
from hpcrl.errors import EnvironmentFailedError, HpcrlError, PeerLostError, RolloutsFailedError
from hpcrl.reporting.reports import ReportedFile
from hpcrl.rollouts.distillation.teacher import TeacherError
from hpcrl.rollouts.engines.client import EngineError
from hpcrl.rollouts.environments import EnvironmentLostError, EnvironmentRaisedError
from hpcrl.rollouts.environments.outcomes import OutcomeError, plain_text
from hpcrl.rollouts.sampling.branches import TooManyBranchesError
from hpcrl.runs.rollout_failures import EnvironmentFailures, FailureCause, FirstFailure, RolloutFailures
from hpcrl.sandboxes import SandboxEvictedError

_log = logging.getLogger(__name__)

_MAX_IN_A_ROW = 64
"""Maximum number of consecutive failures, which end the run."""
_WAVES = 4
"""Window of the failed share, as a multiple of the maximum number of rollouts in flight."""
_WHAT = 500
"""Maximum number of characters of an exception that is recorded."""


class NoRoomError(ValueError):
    """Raised where the prompt of a rollout leaves no room for an answer."""

    def __init__(self) -> None:
        super().__init__("the prompt leaves no room for an answer (engine.max_model_len)")


@dataclass(slots=True, eq=False)
class RunningRollout:
    """Rollout that has begun. ``failed`` where it has failed, and counts in the share that ends a run."""

    environment: str
    failed: bool = False


@dataclass(slots=True)
class _Tally:
    """Counts of one environment."""

    started: int = 0
    finished: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    first: dict[str, FirstFailure] = field(default_factory=dict)
    refused_parts: dict[str, int] = field(default_factory=dict)
    first_refused: dict[str, str] = field(default_factory=dict)
    tampered: int = 0
    newest: collections.deque[RunningRollout] = field(default_factory=collections.deque)
    failed_of_newest: int = 0
    warned: bool = False

    def of(self, environment: str) -> EnvironmentFailures:
        """Return a copy for a report."""
        return EnvironmentFailures(
            environment=environment,
            started=self.started,
            finished=self.finished,
            failed=dict(self.failed),
            first=dict(self.first),
            refused_parts=dict(self.refused_parts),
            first_refused=dict(self.first_refused),
            tampered=self.tampered,
        )


def describe_failure(error: Exception) -> tuple[FailureCause, FirstFailure]:
    """Return why a rollout failed, and its error in one line with the place in the environment's own code."""
    where = ""
    if isinstance(error, EnvironmentRaisedError):
        cause, what, where = FailureCause(error.cause), error.what, error.where
    elif isinstance(error, EnvironmentLostError):
        cause, what = FailureCause.LOST, str(error)
    elif isinstance(error, EngineError):
        cause, what = FailureCause.ENGINE, str(error)
    else:
        kinds = {
            OutcomeError: FailureCause.UNUSABLE,
            NoRoomError: FailureCause.NO_ROOM,
            TooManyBranchesError: FailureCause.BRANCHES,
            TeacherError: FailureCause.TEACHER,
            TimeoutError: FailureCause.TIMEOUT,
        }
        cause = next((value for kind, value in kinds.items() if isinstance(error, kind)), FailureCause.RAISED)
        plain = isinstance(error, OutcomeError | NoRoomError | TeacherError | TooManyBranchesError)
        what = str(error) if plain else f"{type(error).__name__}: {error}"
        if cause in (FailureCause.RAISED, FailureCause.TIMEOUT) and error.__traceback__ is not None:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{frame.filename}:{frame.lineno} in {frame.name}"
    if cause is FailureCause.RAISED and SandboxEvictedError.__name__ in what:
        # by its name: the error was raised in the process of an environment, or of a checker of one
        cause = FailureCause.EVICTED
    first_line = plain_text(" ".join(what.strip().partition("\n")[0].split()), _WHAT)
    return cause, FirstFailure(time_s=time.time(), what=first_line, where=plain_text(where, _WHAT))


class FailureCount:
    """Counts rollouts by environment and cause, and decides when these are too many."""

    def __init__(
        self,
        config: RolloutFailuresConfig | None = None,
        *,
        max_in_flight: int = 0,
        on_failing: Callable[[EnvironmentFailures], None] = lambda failures: None,
        on_evicted: Callable[[str, FirstFailure], None] = lambda environment, first: None,
    ) -> None:
        """Initialise the counts.

        Parameters
        ----------
        config:
            Share of failed rollouts that ends the run; None: no share does.
        max_in_flight:
            Rollouts that may run at once.
        on_failing:
            Called once for each environment whose share of failed rollouts reaches the share for a warning.
        on_evicted:
            Called once for each environment, when it has lost a sandbox to the memory limit of all sandboxes.
        """
        self._end_share = None if config is None else config.end_share
        self._min_rollouts = 0 if config is None else config.min_rollouts
        self._window = max(self._min_rollouts, _WAVES * max_in_flight)
        self._on_failing, self._on_evicted = on_failing, on_evicted
        self._in_a_row = 0
        self._deaths: set[tuple[str, int]] = set()
        self._tallies: dict[str, _Tally] = {}

    def report(self) -> list[EnvironmentFailures]:
        """Return the counts of each environment so far."""
        return [tally.of(name) for name, tally in self._tallies.items()]

    def begin(self, environment: str) -> RunningRollout:
        """Count a rollout that begins; return its handle for `finished` and `failed`."""
        tally = self._tallies.setdefault(environment, _Tally())
        tally.started += 1
        rollout = RunningRollout(environment)
        tally.newest.append(rollout)
        if len(tally.newest) > self._window:
            tally.failed_of_newest -= tally.newest.popleft().failed
        return rollout

    def finished(self, rollout: RunningRollout, refused: Mapping[str, str], *, tampered: bool = False) -> None:
        """Count a rollout that has a reward, parts of it that were ``refused``, and whether it has tampered."""
        self._in_a_row = 0
        tally = self._tallies[rollout.environment]
        tally.finished += 1
        if tampered and not tally.tampered:
            _log.warning("environment %r: a rollout interfered with its judge", rollout.environment)
        tally.tampered += tampered
        for part, what in refused.items():
            if part not in tally.refused_parts:
                name = rollout.environment
                _log.warning("environment %r: part %r of a reward is left out: it is %s", name, part, what)
                tally.first_refused[part] = what
            tally.refused_parts[part] = tally.refused_parts.get(part, 0) + 1

    def failed(self, error: Exception, rollout: RunningRollout) -> HpcrlError | None:
        """Count a rollout that failed; return the error that ends the run where these are too many."""
        tally = self._tallies[rollout.environment]
        cause, first = describe_failure(error)
        tally.failed[cause.value] = tally.failed.get(cause.value, 0) + 1
        tally.first.setdefault(cause.value, first)
        if cause is FailureCause.EVICTED and tally.failed[cause.value] == 1:
            self._on_evicted(rollout.environment, first)
        found = tally.of(rollout.environment)
        if found.warns and not tally.warned:
            tally.warned = True
            self._on_failing(found)
        if isinstance(error, EnvironmentLostError):
            # the death of one process counts as one failure, however many rollouts it had; several may die together
            if error.death in self._deaths:
                return None
            self._deaths.add(error.death)
        self._in_a_row += 1
        told = isinstance(error, EnvironmentRaisedError | EnvironmentLostError)
        text = str(error) if told else f"{type(error).__name__}: {error}"
        _log.warning(
            "a rollout failed: %s",
            text,
            exc_info=None if told or isinstance(error, EngineError | TeacherError | TooManyBranchesError) else error,
        )
        if self._in_a_row < _MAX_IN_A_ROW:
            # failed engines are restarted, and other parts decide when they end the run
            return None if cause is FailureCause.ENGINE else self._too_large_a_share(rollout, tally)
        count = f"{self._in_a_row} rollouts failed one after the other"
        if told:
            head, *more = text.splitlines()
            return EnvironmentFailedError("\n".join([f"{head} ({count})", *more]))
        lost = isinstance(error, EngineError) and error.unreachable
        kind = PeerLostError if lost else HpcrlError
        return kind(f"{count}; the last: {text}")

    def _too_large_a_share(self, rollout: RunningRollout, tally: _Tally) -> HpcrlError | None:
        """Count a failure among the newest rollouts; return the error that ends the run above the maximum share."""
        if rollout in tally.newest:  # by identity; it may have begun long ago
            rollout.failed = True
            tally.failed_of_newest += 1
        newest = len(tally.newest)
        if self._end_share is None or newest < self._min_rollouts or not tally.failed_of_newest:
            return None
        share = tally.failed_of_newest / newest
        if share <= self._end_share:
            return None
        lines = [
            f"environment {rollout.environment!r}: {tally.failed_of_newest} of the newest {newest} rollouts failed "
            f"({share:.0%}; rollouts.failures.end_share is {self._end_share:g})"
        ]
        for cause, count in sorted(tally.failed.items(), key=lambda item: -item[1]):
            first = tally.first[cause]
            place = f"\n      {first.where}" if first.where else ""
            lines.append(f"    {count} {FailureCause(cause).words}; the first: {first.what}{place}")
        lines.append(
            "    hint: correct the environment (hpcrl env try), then resume; if this share may fail, raise "
            "rollouts.failures.end_share (null: no bound)"
        )
        return RolloutsFailedError("\n".join(lines))


class FailureReport:
    """File in which an attempt reports its failed rollouts."""

    def __init__(self, path: Path, count: FailureCount) -> None:
        self._file = ReportedFile(path, durable=False)
        self._count = count
        self._said: list[EnvironmentFailures] | None = None

    def write(self) -> None:
        """Replace the file, where something has changed."""
        found = self._count.report()
        if found != self._said:
            self._said = found
            self._file.put(msgspec.json.encode(RolloutFailures(time_s=time.time(), environments=found)))
