"""Runs side by side: held-out reward at equal cost, cost of a reward, and whether a difference is more than noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from string import ascii_uppercase
from typing import Literal, NamedTuple

import msgspec

from hpcrl.analysis.comparison.differences import RunDifference, equal_settings, find_differences
from hpcrl.analysis.comparison.measured_run import HeldOutPoint, MeasuredRun, measured_run
from hpcrl.analysis.comparison.noise import Bounded, NoiseVerdict, difference_interval, pooled_interval
from hpcrl.errors import UsageError
from hpcrl.runs.rundir import RunDir

COMPARE_SCHEMA = "hpcrl.compare/1"
Axis = Literal["steps", "tokens", "gpu_hours", "hours"]
_COSTS: dict[Axis, Callable[[HeldOutPoint], float | None]] = {
    "steps": lambda point: float(point.step),
    "tokens": lambda point: None if point.tokens is None else float(point.tokens),
    "gpu_hours": lambda point: point.gpu_hours,
    "hours": lambda point: point.hours,
}
_SLACK = 1.0 + 1e-9


class EqualCost(msgspec.Struct, frozen=True, kw_only=True):
    """Held-out rewards at one cost that all runs have reached.

    Attributes
    ----------
    axis:
        ``hours`` stands for ``gpu_hours`` where a run has no GPUs.
    at:
        The largest step that all have evaluated; of other axes the lowest of the runs' costs at their last evaluation.
        None where no cost is common.
    points:
        The newest evaluation of each run within that cost; None where there is none, or its cost is unknown.
    """

    axis: Axis
    at: float | None
    points: list[HeldOutPoint | None]


class CostOfReward(msgspec.Struct, frozen=True, kw_only=True):
    """First evaluation of each run with at least a reward; None where there is none."""

    reward: float
    points: list[HeldOutPoint | None]


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison of runs, in the order in which they were named.

    Attributes
    ----------
    differences:
        Settings, code, versions and start models that differ.
    replicates:
        Labels of runs that differ in their seed alone, in groups.
    equal:
        Held-out rewards at equal steps, tokens and GPU-hours.
    reward:
        Cost of a reward; None where no run has a held-out evaluation.
    noise:
        Each group of replicates against the first.
    notes:
        What is unknown, and why, in sentences.
    """

    schema: str
    runs: list[MeasuredRun]
    differences: list[RunDifference]
    replicates: list[list[str]]
    equal: list[EqualCost]
    reward: CostOfReward | None
    noise: list[NoiseVerdict]
    notes: list[str]


def compare_runs(runs: Sequence[RunDir], *, reward: float | None = None, heldout: str | None = None) -> Comparison:
    """Compare runs; one that is named twice counts once.

    Parameters
    ----------
    reward:
        Held-out reward whose cost is compared; by default the highest that every run has reached.
    heldout:
        A set of ``evaluation.sets`` in place of the recipe's held-out prompts.

    Raises
    ------
    UsageError
        Fewer than two different runs were named, or none has evaluated the set ``heldout``.
    """
    runs = list({run.path.resolve(): run for run in runs}.values())
    if len(runs) < 2:
        raise UsageError(
            "a comparison needs two runs or more\n    hint: hpcrl compare RUN RUN, or hpcrl compare --tag WORD"
        )
    measured = [measured_run(run, run_label(number), heldout=heldout) for number, run in enumerate(runs)]
    if heldout is not None and not any(each.points for each in measured):
        raise UsageError(f"no run has evaluated a set {heldout!r}\n    hint: evaluation.sets of the recipe names sets")
    groups = equal_settings(runs)
    last: Axis = "gpu_hours" if all(each.gpu_hours is not None for each in measured) else "hours"
    equal = [_equal(measured, axis) for axis in ("steps", "tokens", last)]
    return Comparison(
        schema=COMPARE_SCHEMA,
        runs=measured,
        differences=find_differences(runs),
        replicates=[[measured[number].label for number in group] for group in groups],
        equal=equal,
        reward=_cost_of_reward(measured, reward),
        noise=[_verdict(measured, groups[0], group, equal[0]) for group in groups[1:]],
        notes=_notes(measured, len(groups)),
    )


def run_label(number: int) -> str:
    """Return the letter of a run by its place: A to Z, then A1 and so on."""
    rounds, place = divmod(number, len(ascii_uppercase))
    return ascii_uppercase[place] + (str(rounds) if rounds else "")


def _equal(runs: Sequence[MeasuredRun], axis: Axis) -> EqualCost:
    cost = _COSTS[axis]
    costs = [[value for point in run.points if (value := cost(point)) is not None] for run in runs]
    known = [values for values in costs if values]
    if len(known) < 2:
        return EqualCost(axis=axis, at=None, points=[None] * len(runs))
    common = set[float]()
    if axis == "steps":
        common = set(known[0]).intersection(*known[1:])
    at = max(common) if common else min(max(values) for values in known)
    return EqualCost(axis=axis, at=at, points=[_newest_within(run, cost, at) for run in runs])


def _newest_within(run: MeasuredRun, cost: Callable[[HeldOutPoint], float | None], at: float) -> HeldOutPoint | None:
    within = [point for point in run.points if (value := cost(point)) is not None and value <= at * _SLACK]
    return within[-1] if within else None


def _cost_of_reward(runs: Sequence[MeasuredRun], reward: float | None) -> CostOfReward | None:
    evaluated = [run for run in runs if run.points]
    if not evaluated:
        return None
    if reward is None:
        reward = min(max(point.reward for point in run.points) for run in evaluated)
    points = [next((point for point in run.points if point.reward >= reward - 1e-9), None) for run in runs]
    return CostOfReward(reward=reward, points=points)


def _verdict(
    runs: Sequence[MeasuredRun], first: Sequence[int], second: Sequence[int], equal: EqualCost
) -> NoiseVerdict:
    """Compare two groups at the largest step that all runs have evaluated."""
    sides = [[point for number in group if (point := equal.points[number]) is not None] for group in (first, second)]
    labels = [[runs[number].label for number in group] for group in (first, second)]
    difference = None
    if sides[0] and sides[1]:
        means = [math.fsum(point.reward for point in side) / len(side) for side in sides]
        difference = means[1] - means[0]
    judged = _judge(sides)
    return NoiseVerdict(
        first=labels[0],
        second=labels[1],
        step=None if equal.at is None else int(equal.at),
        difference=difference,
        low=judged.low,
        high=judged.high,
        more_than_noise=None if judged.low is None or judged.high is None else judged.low > 0.0 or judged.high < 0.0,
        noise=judged.noise,
        method=judged.method,
    )


class _Judged(NamedTuple):
    """Interval of a difference, its noise and its method, or the reason why it is unknown."""

    method: str
    noise: str = "unknown"
    low: float | None = None
    high: float | None = None


def _judge(sides: Sequence[Sequence[HeldOutPoint]]) -> _Judged:
    """Return the interval of a difference.

    Where one of the sides has two runs or more, the noise is the spread between seeds. Else it is that of evaluation.
    """
    counted = " and ".join(f"{len(side)} run" + ("" if len(side) == 1 else "s") for side in sides)
    if not sides[0] or not sides[1]:
        return _Judged(f"no held-out evaluation at an equal step ({counted})")
    if len({point.step for side in sides for point in side}) > 1:
        return _Judged("no step was evaluated by all runs")
    pooled = pooled_interval(*([point.reward for point in side] for side in sides))
    if pooled is not None:
        low, high, freedom = pooled
        return _Judged(f"Student's t, {counted}, spread pooled, {freedom} degrees of freedom", "seeds", low, high)
    ends = [
        Bounded(point.reward, point.low, point.high)
        for (point,) in sides
        if point.low is not None and point.high is not None
    ]
    if len(ends) < 2:
        return _Judged(f"an interval is unknown ({counted})")
    used = ", ".join(f"{point.interval} of {point.count:,} {point.of}" for (point,) in sides)
    method = f"difference of independent means, {used}; {counted}"
    return _Judged(method, "evaluation", *difference_interval(*ends))


def _notes(runs: Sequence[MeasuredRun], groups: int) -> list[str]:
    notes = []
    for run in runs:
        if not run.points:
            notes.append(f"{run.label}: no held-out evaluation of {run.heldout} is on record")
        elif any(point.tokens is None for point in run.points):
            notes.append(f"{run.label}: tokens of some steps are unknown, their records are missing")
        if run.hours is None:
            notes.append(f"{run.label}: hours are unknown, no attempt is on record")
        elif run.gpu_hours is None:
            notes.append(f"{run.label}: its cluster profile has no GPUs; hours stand for GPU-hours")
    if any(point.interval == "Wilson" for run in runs for point in run.points):
        notes.append(
            "intervals are 95 %, Wilson: for rewards between 0 and 1, and wider than needed where rewards lie between"
        )
    if groups == 1:
        notes.append("all runs have equal settings and code but for their seed: nothing is compared against noise")
    return notes
