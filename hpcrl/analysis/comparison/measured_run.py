"""Results and cost of one run, for comparisons with others."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from statistics import median
from typing import Any

import msgspec

from hpcrl.analysis.comparison.noise import wilson_interval
from hpcrl.errors import UsageError
from hpcrl.runs.consumed import ConsumedRollouts
from hpcrl.runs.events import read_events
from hpcrl.runs.metrics import StepRecord, read_metrics
from hpcrl.runs.observe import observe
from hpcrl.runs.rollout_failures import read_failures
from hpcrl.runs.run_progress import read_evaluations, read_set_evaluations
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.views.held_hours import HeldHours, read_held_hours

_CHECKED_STEPS = 3
"""Newest steps whose rewards are checked for lying between 0 and 1."""
_DROPS = {
    "dropped_stale": "too old when finished",
    "cancelled_stale": "cancelled: too old",
    "dropped_environment": "failed in the environment",
    "dropped_engine": "no answer of an engine",
    "dropped_branches": "too many branches",
    "dropped_group": "too few in the group",
    "dropped_zero_variance": "no variance in the group",
}
_FAULTS = {
    "component.restarting": "replica restarted",
    "component.lost": "replica given up",
    "component.hung": "replica hung",
    "replica.lost": "replica's job lost",
    "attempt.retried": "attempt retried in its nodes",
    "nodes.excluded": "nodes excluded",
    "nodes.replaced": "lost nodes replaced by spare ones",
    "engine.wrong_weights": "engine had wrong weights",
    "environment.lost": "environment's process lost",
    "store.segment_lost": "memory left the KV pool",
    "trainer.step_skipped": "step skipped: gradient not finite",
    "trainer.checkpoint_failed": "checkpoint failed",
    "trainer.checkpoint_skipped": "checkpoint could not be restored",
    "trainer.version_refused": "weights could not be written",
    "evaluation.none_finished": "evaluation without a result",
}
"""Events that are counted, with words for them."""


class HeldOutPoint(msgspec.Struct, frozen=True, kw_only=True):
    """A held-out evaluation and what the run had cost until then.

    Attributes
    ----------
    step:
        Version that was evaluated.
    reward, low, high:
        The mean and its 95 % interval; None where it is unknown.
    interval:
        Method of the interval; empty where there is none.
    count, of:
        Number of rollouts or prompts that the mean is over, and which of both.
    failed:
        Held-out rollouts that failed.
    tokens:
        Tokens of all batches until that step; None where records of steps are missing.
    hours, gpu_hours:
        Held until the evaluation was done, all attempts together; None where that is unknown.
    """

    step: int
    reward: float
    low: float | None
    high: float | None
    interval: str
    count: int
    of: str
    failed: int = 0
    tokens: int | None = None
    hours: float | None = None
    gpu_hours: float | None = None


class MeasuredRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a comparison.

    Attributes
    ----------
    label:
        Letter by which tables name it.
    steps, total_steps:
        Optimizer steps done, and of the whole run.
    tokens:
        Tokens of all batches; None where records of steps are missing.
    step_s, waiting:
        Median seconds of a step, and the share of all steps in which the trainer waited for rollouts.
    heldout:
        Name of the held-out evaluations of ``points``.
    drops:
        Rollouts that came to nothing, by cause; None where the run has no counts.
    started:
        Rollouts that began.
    failures:
        Failed training rollouts by cause, as the environments' report has them.
    faults:
        Events by kind, in words.
    """

    label: str
    name: str
    path: str
    state: str
    steps: int
    total_steps: int | None
    tokens: int | None
    step_s: float | None
    waiting: float | None
    hours: float | None
    gpu_hours: float | None
    heldout: str
    points: list[HeldOutPoint]
    started: int | None
    drops: dict[str, int] | None
    failures: dict[str, int]
    attempts: int
    faults: dict[str, int]


def measured_run(run: RunDir, label: str, *, heldout: str | None = None) -> MeasuredRun:
    """Read what a run reached.

    Parameters
    ----------
    heldout:
        A set of ``evaluation.sets`` in place of the recipe's held-out prompts.

    Raises
    ------
    UsageError
        The run has no evaluation of that set, and has others.
    """
    view, metrics = observe(run), read_metrics(run)
    hours = read_held_hours(run, view)
    seconds = [sum(record.phases_s.values()) for record in metrics]
    waits = sum(record.phases_s.get("wait_batch", 0.0) for record in metrics)
    counters = metrics[-1].rollouts if metrics else {}
    return MeasuredRun(
        label=label,
        name=run.name,
        path=str(run.path),
        state=str(view.state),
        steps=metrics[-1].step if metrics else 0,
        total_steps=run.recipe().trainer.steps,
        tokens=_tokens(metrics).get(metrics[-1].step) if metrics else 0,
        step_s=median(seconds) if seconds else None,
        waiting=waits / sum(seconds) if sum(seconds) else None,
        hours=hours.wall_h,
        gpu_hours=hours.gpu_hours(hours.wall_h),
        heldout=heldout or "held-out prompts",
        points=_points(run, metrics, hours, heldout),
        started=int(counters["started"]) if "started" in counters else None,
        drops=_drops(counters),
        failures=_failures(run),
        attempts=view.attempts,
        faults=_faults(run),
    )


def _tokens(metrics: Sequence[StepRecord]) -> dict[int, int]:
    """Return the tokens trained until each step, from the first on without a gap."""
    totals = accumulate(record.tokens for record in metrics)
    found = {0: 0}
    for number, (record, total) in enumerate(zip(metrics, totals, strict=True), start=1):
        if record.step != number:
            break
        found[record.step] = total
    return found


def _points(run: RunDir, metrics: Sequence[StepRecord], hours: HeldHours, heldout: str | None) -> list[HeldOutPoint]:
    tokens = _tokens(metrics)

    def cost(step: int, time_s: float) -> dict[str, Any]:
        held = hours.until(time_s)
        return {"tokens": tokens.get(step), "hours": held, "gpu_hours": hours.gpu_hours(held)}

    if heldout is not None:
        return _set_points(run, heldout, cost)
    found = [each for each in read_evaluations(run) if math.isfinite(each.reward)]
    bounded = bool(found) and _bounded(run, [each.reward for each in found])
    points = []
    for each in found:
        interval = wilson_interval(each.reward, each.count) if bounded else None
        points.append(
            HeldOutPoint(
                step=each.version,
                reward=each.reward,
                low=None if interval is None else interval[0],
                high=None if interval is None else interval[1],
                interval="" if interval is None else "Wilson",
                count=each.count,
                of="rollouts",
                failed=each.failed,
                **cost(each.version, each.time_s),
            )
        )
    return points


def _set_points(run: RunDir, heldout: str, cost: Any) -> list[HeldOutPoint]:
    found = read_set_evaluations(run)
    names = sorted({each.set for each in found})
    if names and heldout not in names:
        raise UsageError(
            f"{run.name} has evaluated no set {heldout!r}\n    hint: it has {', '.join(names)}; without --heldout its "
            "held-out prompts are compared"
        )
    return [
        HeldOutPoint(
            step=each.version,
            reward=each.mean.value,
            low=each.mean.low,
            high=each.mean.high,
            interval="bootstrap" if each.mean.low is not None else "",
            count=each.mean.prompts or each.prompts,
            of="prompts",
            failed=each.failed,
            **cost(each.version, each.time_s),
        )
        for each in found
        if each.set == heldout and each.mean.value is not None
    ]


def _bounded(run: RunDir, means: Sequence[float]) -> bool:
    """Return whether no reward is known that lies outside of 0 to 1, by the newest steps and the means."""
    consumed = ConsumedRollouts(run.rollouts_dir)
    rewards = list(means)
    for step in consumed.newest_steps(_CHECKED_STEPS):
        for line in consumed.of(step):
            try:
                rewards.append(float(json.loads(line)["reward"]))
            except (ValueError, KeyError, TypeError, RecursionError):
                continue  # the torn last line of a killed writer, or a reward that was not finite
    return all(0.0 <= reward <= 1.0 for reward in rewards)


def _drops(counters: Mapping[str, float]) -> dict[str, int] | None:
    if not any(name in counters for name in _DROPS):
        return None
    return {words: int(counters[name]) for name, words in _DROPS.items() if counters.get(name, 0.0) > 0}


def _failures(run: RunDir) -> dict[str, int]:
    counts = Counter[str]()
    for each in read_failures(run):
        counts.update(each.failed)
    return dict(counts.most_common())


def _faults(run: RunDir) -> dict[str, int]:
    counts = Counter(event.kind for event in read_events(run) if event.kind in _FAULTS)
    return {words: counts[kind] for kind, words in _FAULTS.items() if counts[kind]}
