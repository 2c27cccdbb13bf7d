"""Differences of what runs have learned, with intervals: by bootstrap over prompts, or those of ``hpcrl compare``."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from hpcrl.analysis.comparison.compared import compare_runs
from hpcrl.analysis.finished_rollouts import FinishedRollouts
from hpcrl.analysis.series import RunHistory, known

RESAMPLES = 2000
"""Number of bootstrap samples."""
CAUTION = (
    "Intervals cover the prompts and samples that were drawn. Those by Student's t cover the seeds of runs; others do "
    "not: two runs of one recipe with other seeds can differ by more. Compare several seeds before a conclusion."
)
_LEAST_STEPS = 5
_WINDOW_SHARE = 0.1


class LearningDifference(NamedTuple):
    """A difference, the second run minus the first.

    Attributes
    ----------
    what:
        What is compared, and where.
    low, high:
        Interval of 95 %; None where it is unknown.
    method:
        Method, and the numbers that it is over.
    """

    what: str
    difference: float | None
    low: float | None
    high: float | None
    method: str

    @property
    def more_than_noise(self) -> bool | None:
        """Return whether the interval excludes 0; None where it is unknown."""
        return None if self.low is None or self.high is None else not self.low <= 0.0 <= self.high


def training_difference(one: FinishedRollouts, two: FinishedRollouts) -> LearningDifference:
    """Return the difference of training rewards over the newest steps that both runs have."""
    last = min(max(one.trained, default=0), max(two.trained, default=0))
    if not last:
        reason = one.why_not or two.why_not or "there is no common step"
        return LearningDifference("reward in training", None, None, None, f"unknown: {reason}")
    first = max(1, last - max(_LEAST_STEPS, round(last * _WINDOW_SHARE)) + 1)
    values = [prompt_means(finished, first, last) for finished in (one, two)]
    what = f"reward in training, steps {first} to {last}"
    counts = f"{len(values[0]):,} and {len(values[1]):,} prompts, each the mean of its rollouts"
    if min(map(len, values)) < 2:
        return LearningDifference(what, None, None, None, f"unknown: too few prompts ({counts})")
    difference = math.fsum(values[1]) / len(values[1]) - math.fsum(values[0]) / len(values[0])
    low, high = bootstrap_difference(values[0], values[1])
    return LearningDifference(what, difference, low, high, f"bootstrap over prompts, {RESAMPLES:,} samples: {counts}")


def prompt_means(finished: FinishedRollouts, first: int, last: int) -> list[float]:
    """Return the mean reward of each prompt over the rollouts that some steps trained on."""
    rewards: dict[tuple[str, int], list[float]] = defaultdict(list)
    for step in range(first, last + 1):
        for held in finished.trained.get(step, ()):
            if (reward := known(held.entry.reward)) is not None:
                rewards[held.entry.environment, held.entry.prompt_index].append(reward)
    return [math.fsum(each) / len(each) for each in rewards.values()]


def bootstrap_difference(one: Sequence[float], two: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """Return the interval of 95 % of ``mean(two) - mean(one)``; both are drawn again with replacement.

    Raises
    ------
    ValueError
        One of them has fewer than two numbers.
    """
    import numpy as np  # noqa: PLC0415 - an extra

    if min(len(one), len(two)) < 2:
        raise ValueError("a bootstrap needs two numbers of each")
    generator = np.random.default_rng(seed)
    means = []
    for values in (np.asarray(one, np.float64), np.asarray(two, np.float64)):
        # one sample at a time: runs have many prompts
        means.append(
            np.array([values[generator.integers(0, len(values), len(values))].mean() for _ in range(RESAMPLES)])
        )
    low, high = np.quantile(means[1] - means[0], [0.025, 0.975])
    return float(low), float(high)


def held_out_differences(histories: Sequence[RunHistory]) -> list[tuple[str, LearningDifference]]:
    """Return the differences of held-out rewards and of sets that all runs have evaluated, with the names of the runs.

    They are the verdicts of `hpcrl.analysis.comparison.compared.compare_runs`: runs that differ in their seed alone are
    one side.
    """
    runs = [history.run for history in histories]
    if len({run.path.resolve() for run in runs}) < 2:
        return []
    common = set[str].intersection(*({each.set for each in history.sets} for history in histories))
    found = []
    for name in (None, *sorted(common)):
        compared = compare_runs(runs, heldout=name)
        names = {run.label: run.name for run in compared.runs}
        for verdict in compared.noise:
            pair = [" + ".join(names[label] for label in side) for side in (verdict.second, verdict.first)]
            what = "held-out reward" if name is None else f"set {name}"
            at = "" if verdict.step is None else f" after step {verdict.step}"
            method = verdict.method if verdict.low is not None else f"unknown: {verdict.method}"
            difference = LearningDifference(what + at, verdict.difference, verdict.low, verdict.high, method)
            found.append((f"{pair[0]} minus {pair[1]}", difference))
    return found
