"""How far a run is: steps, held-out evaluations, checkpoints, and the time that is left."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any

import msgspec

from hpcrl.checkpoints.ledger import CheckpointLedger
from hpcrl.checkpoints.restore import RestoreDecision
from hpcrl.runs.events import read_events
from hpcrl.runs.lenient import convert_lenient
from hpcrl.runs.metrics import StepRecord, read_metrics
from hpcrl.runs.rollout_failures import EnvironmentFailures, failures_of_counters, read_failures
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.start.past import read_past
from hpcrl.runs.start.restart import read_restored

__all__ = [
    "Evaluation",
    "MeanOfPrompts",
    "Progress",
    "SetEvaluation",
    "read_evaluations",
    "read_progress",
    "read_set_evaluations",
]

_RATE_STEPS = 20
"""Steps that the estimate of the remaining time looks back on."""


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """One held-out evaluation (event ``evaluation`` of the orchestrator)."""

    version: int
    reward: float
    time_s: float = 0.0
    due: int | None = None
    """The version that was to be evaluated, where the engines skipped it."""
    by_env: dict[str, float] = {}
    parts: dict[str, float] = {}
    prompts: int = 0
    """Held-out rollouts that finished."""
    failed: int = 0
    """Those that did not."""
    counted: int | None = None
    """Rollouts that ``reward`` is a mean over; None in records of earlier versions: those that finished."""
    counted_by_env: dict[str, int] = {}
    counted_by_part: dict[str, int] = {}
    """The same of each mean in ``by_env`` and ``parts``."""
    failures: str = "exclude"
    """How those that failed count in ``reward`` (``evaluation.failures`` of the recipe)."""
    failed_by_env: dict[str, int] = {}
    failed_by_cause: dict[str, int] = {}
    first_failure: dict[str, str] | None = None
    """The first of them: ``environment``, ``what`` and ``where``."""
    attempt: int = 0

    @property
    def count(self) -> int:
        """Rollouts that ``reward`` is a mean over."""
        return self.prompts if self.counted is None else self.counted


class MeanOfPrompts(msgspec.Struct, frozen=True, kw_only=True):
    """A mean over prompts, and the ends of its interval by bootstrap; None where that is not known."""

    value: float | None = None
    low: float | None = None
    high: float | None = None
    prompts: int = 0


class SetEvaluation(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluation of a set of held-out prompts (event ``evaluation.set`` of the orchestrator)."""

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
    """By k."""
    by_env: dict[str, Any] = {}
    """The same numbers of each environment."""
    attempt: int = 0


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a run is.

    Attributes
    ----------
    steps, total_steps:
        Optimizer steps done, and of the whole run.
    staleness_bound:
        ``rollouts.max_off_policy_steps`` of the recipe: what is older is not trained on.
    skipped_steps, last_skipped_step:
        How many steps left the weights as they were because their gradient was not finite (``trainer.nonfinite``), and
        the newest of them; None where there is none.
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
        What the newest attempt began with, by its trainer; None before it has said so.
    changes:
        What it runs that was not submitted so (`hpcrl.runs.start.snapshot`).
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
    """Held-out evaluations in version order. A version that a resume evaluated again counts once.

    What an attempt evaluated of a past that a later one has given up does not count (`hpcrl.runs.start.past`).
    """
    found: dict[int, Evaluation] = {}
    past = read_past(run)
    for event in sorted(read_events(run, kind="evaluation"), key=lambda event: event.attempt):
        data: dict[str, Any] = {**event.data, "time_s": event.time_s, "attempt": event.attempt}
        if data.get("due") == data.get("version"):
            data.pop("due", None)
        evaluation = convert_lenient(data, Evaluation)
        if evaluation is not None and past.holds(event.attempt, evaluation.version):
            found[evaluation.version] = evaluation
    return [found[version] for version in sorted(found)]


def read_set_evaluations(run: RunDir) -> list[SetEvaluation]:
    """Evaluations of sets in version order, as `read_evaluations` has those of the others."""
    found: dict[tuple[int, str], SetEvaluation] = {}
    past = read_past(run)
    for event in sorted(read_events(run, kind="evaluation.set"), key=lambda event: event.attempt):
        data: dict[str, Any] = {**event.data, "time_s": event.time_s, "attempt": event.attempt}
        evaluation = convert_lenient(data, SetEvaluation)
        if evaluation is not None and past.holds(event.attempt, evaluation.version):
            found[evaluation.version, evaluation.set] = evaluation
    return [found[key] for key in sorted(found)]


@functools.lru_cache
def _steps_and_bound(run_path: Path, written_ns: int) -> tuple[int, int]:
    # written at submit and by a resume; parsing YAML at each look would cost more than all the rest
    recipe = RunDir(run_path).recipe()
    return recipe.trainer.steps, recipe.rollouts.max_off_policy_steps


def read_progress(run: RunDir, metrics: list[StepRecord] | None = None) -> Progress:
    """How far a run is. ``metrics`` saves reading them where the caller has them already."""
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
    """Seconds since a checkpoint got its name; None where it was removed meanwhile."""
    try:
        # the directory changed last when its manifest was written
        return max(0.0, time.time() - path.stat().st_mtime)
    except FileNotFoundError:
        return None
