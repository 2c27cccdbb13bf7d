"""Progress of a run: steps, held-out evaluations, checkpoints, and the remaining time."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from hpcrl.checkpoints.ledger import CheckpointLedger
from hpcrl.checkpoints.restore import RestoreDecision
from hpcrl.runs.events import Event, read_events
from hpcrl.runs.lenient import convert_lenient
from hpcrl.runs.metrics import StepRecord, read_metrics
from hpcrl.runs.past import read_past
from hpcrl.runs.resume_request import read_restored
from hpcrl.runs.rollout_failures import EnvironmentFailures, failures_of_counters, read_failures
from hpcrl.runs.rundir import RunDir

_RATE_STEPS = 20
"""Number of newest steps from which the remaining time is estimated."""


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """Held-out evaluation (event ``evaluation`` of the orchestrator)."""

    version: int
    reward: float
    time_s: float = 0.0
    due: int | None = None
    """Version that was to be evaluated, where the engines skipped it."""
    by_env: dict[str, float] = {}
    parts: dict[str, float] = {}
    prompts: int = 0
    """Number of held-out rollouts that finished."""
    failed: int = 0
    """Number of held-out rollouts that failed."""
    counted: int | None = None
    """Number of rollouts that ``reward`` is a mean over; None in records of earlier versions: those that finished."""
    counted_by_env: dict[str, int] = {}
    counted_by_part: dict[str, int] = {}
    """Number of rollouts of each mean in ``by_env`` and ``parts``."""
    failures: str = "exclude"
    """Treatment of failed rollouts in ``reward`` (``evaluation.failures`` of the recipe)."""
    failed_by_env: dict[str, int] = {}
    failed_by_cause: dict[str, int] = {}
    first_failure: dict[str, str] | None = None
    """First failure: ``environment``, ``what`` and ``where``."""
    attempt: int = 0

    @property
    def count(self) -> int:
        """Return the number of rollouts that ``reward`` is a mean over."""
        return self.prompts if self.counted is None else self.counted


class MeanOfPrompts(msgspec.Struct, frozen=True, kw_only=True):
    """Mean over prompts, and the ends of its bootstrap interval; None where that is unknown."""

    value: float | None = None
    low: float | None = None
    high: float | None = None
    prompts: int = 0


class SetEvaluation(msgspec.Struct, frozen=True, kw_only=True):
    """Evaluation of a set of held-out prompts (event ``evaluation.set`` of the orchestrator)."""

    set: str
    version: int
    mean: MeanOfPrompts
    time_s: float = 0.0
    last_version: int | None = None
    due: int | None = None
    prompts: int = 0
    samples: int = 0
    samples_per_prompt: int = 1
    temperature: float = 0.0
    failed: int = 0
    truncated: int = 0
    passed: int = 0
    failures: str = "zero"
    pass_reward: float = 1.0
    pass_at: dict[str, MeanOfPrompts] = {}
    """Values by k."""
    by_env: dict[str, Any] = {}
    """The same numbers of each environment."""
    attempt: int = 0


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of a run.

    Attributes
    ----------
    steps, total_steps:
        Optimizer steps done, and of the whole run.
    staleness_bound:
        ``rollouts.max_off_policy_steps`` of the recipe: older rollouts are not trained on.
    skipped_steps, last_skipped_step:
        Number of steps that left the weights unchanged because their gradient was not finite (``trainer.nonfinite``),
        and the newest of them; None where there is none.
    last:
        The newest step record; None before the first step.
    evaluations:
        Held-out evaluations in version order.
    evaluation_sets:
        The newest evaluation of each set of held-out prompts, by the name of the set.
    rollouts:
        Training rollouts by environment, with those that failed (`hpcrl.runs.rollout_failures`).
    checkpoint_step, checkpoint_age_s:
        Step of the newest checkpoint, and seconds since it was written; None where there is none.
    eta_s:
        Estimate of the remaining seconds from the newest steps; None before the second step.
    restored:
        State with which the newest attempt began, as its trainer recorded it; None before that.
    changes:
        Differences between what the newest attempt runs and what was submitted (`hpcrl.runs.start.snapshot`).
    """

    steps: int
    total_steps: int
    last: StepRecord | None
    evaluations: list[Evaluation]
    evaluation_sets: dict[str, SetEvaluation] = {}
    rollouts: list[EnvironmentFailures] = []
    checkpoint_step: int | None
    eta_s: float | None
    staleness_bound: int | None = None
    skipped_steps: int = 0
    last_skipped_step: int | None = None
    checkpoint_age_s: float | None = None
    restored: RestoreDecision | None = None
    changes: list[str] = []


def read_evaluations(run: RunDir) -> list[Evaluation]:
    """Return the held-out evaluations in version order. A version that a resume evaluated again counts once.

    Evaluations by an attempt of steps that a later one has abandoned do not count (`hpcrl.runs.past`).
    """
    return valid_evaluations(run, read_events(run, kind="evaluation"))


def valid_evaluations(run: RunDir, events: Iterable[Event]) -> list[Evaluation]:
    """Return the evaluations of events of the kind ``evaluation``, selected as in `read_evaluations`."""
    found: dict[int, Evaluation] = {}
    past = read_past(run)
    for event in sorted(events, key=lambda event: event.attempt):
        data: dict[str, Any] = {**event.data, "time_s": event.time_s, "attempt": event.attempt}
        if data.get("due") == data.get("version"):
            data.pop("due", None)
        evaluation = convert_lenient(data, Evaluation)
        if evaluation is not None and past.holds(event.attempt, evaluation.version):
            found[evaluation.version] = evaluation
    return [found[version] for version in sorted(found)]


def read_set_evaluations(run: RunDir) -> list[SetEvaluation]:
    """Return the evaluations of sets in version order, selected as in `read_evaluations`."""
    return valid_set_evaluations(run, read_events(run, kind="evaluation.set"))


def valid_set_evaluations(run: RunDir, events: Iterable[Event]) -> list[SetEvaluation]:
    """Return the evaluations of events of the kind ``evaluation.set``, selected as in `read_evaluations`."""
    found: dict[tuple[int, str], SetEvaluation] = {}
    past = read_past(run)
    for event in sorted(events, key=lambda event: event.attempt):
        data: dict[str, Any] = {**event.data, "time_s": event.time_s, "attempt": event.attempt}
        evaluation = convert_lenient(data, SetEvaluation)
        if evaluation is not None and past.holds(event.attempt, evaluation.version):
            found[evaluation.version, evaluation.set] = evaluation
    return [found[key] for key in sorted(found)]


class _TrainerLimits(msgspec.Struct, frozen=True):
    steps: int


class _RolloutLimits(msgspec.Struct, frozen=True):
    max_off_policy_steps: int


class _Limits(msgspec.Struct, frozen=True):
    """The values of a recipe that a progress has."""

    trainer: _TrainerLimits
    rollouts: _RolloutLimits


@functools.lru_cache
def _steps_and_bound(run_path: Path, written_ns: int) -> tuple[int, int]:
    # cached: the file is written at submit and by a resume, and parsing YAML takes longer than everything else here
    run = RunDir(run_path)
    try:
        # the models of a recipe would take a fifth of the time of `hpcrl status`
        found = msgspec.convert(run.recipe_tree(), _Limits)
    except msgspec.ValidationError:
        recipe = run.recipe()
        return recipe.trainer.steps, recipe.rollouts.max_off_policy_steps
    return found.trainer.steps, found.rollouts.max_off_policy_steps


def read_progress(run: RunDir, metrics: list[StepRecord] | None = None) -> Progress:
    """Return the progress of a run. ``metrics`` saves reading them where the caller has them already."""
    metrics = read_metrics(run) if metrics is None else metrics
    total, bound = _steps_and_bound(run.path, run.recipe_path.stat().st_mtime_ns)
    recent = metrics[-_RATE_STEPS:]
    eta_s = None
    if len(recent) > 1 and recent[0].attempt == recent[-1].attempt:
        per_step = (recent[-1].time_s - recent[0].time_s) / (len(recent) - 1)
        eta_s = per_step * (total - recent[-1].step)
    ledger = CheckpointLedger(run.checkpoints_dir)
    checkpoints = ledger.steps()
    skipped = [record.step for record in metrics if record.skipped]
    attempt = (run.attempts() or [0])[-1]
    return Progress(
        steps=metrics[-1].step if metrics else 0,
        total_steps=total,
        staleness_bound=bound,
        skipped_steps=len(skipped),
        last_skipped_step=skipped[-1] if skipped else None,
        last=metrics[-1] if metrics else None,
        evaluations=read_evaluations(run),
        evaluation_sets={each.set: each for each in read_set_evaluations(run)},
        rollouts=read_failures(run) or (failures_of_counters(metrics[-1].rollouts) if metrics else []),
        checkpoint_step=checkpoints[-1] if checkpoints else None,
        checkpoint_age_s=_age_s(ledger.path_of(checkpoints[-1])) if checkpoints else None,
        eta_s=eta_s,
        restored=read_restored(run, attempt),
        changes=[
            change
            for event in read_events(run, attempt=attempt, kind="attempt.changed")
            for change in event.data.get("changes") or ()
        ],
    )


def _age_s(path: Path) -> float | None:
    """Return the seconds since a checkpoint got its name; None where it was removed meanwhile."""
    try:
        # the directory changed last when its manifest was written
        return max(0.0, time.time() - path.stat().st_mtime)
    except FileNotFoundError:
        return None
