"""Rollouts that failed, in words: the share by environment and cause, and the first exception with its place."""

from __future__ import annotations

from collections.abc import Sequence

from hpcrl.runs.metrics import read_newest
from hpcrl.runs.rollout_failures import EnvironmentFailures, FailureCause, failures_of_counters, read_failures
from hpcrl.runs.run_progress import Evaluation, MeanOfPrompts, SetEvaluation
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.views.words import number

_MOST_PARTS = 3
"""Maximum number of named parts that were left out."""


def rollouts_of(run: RunDir) -> list[EnvironmentFailures]:
    """Read the training rollouts of a run by environment; of a run of an earlier version by its newest step record."""
    found = read_failures(run)
    if not found and (last := read_newest(run)) is not None:
        found = failures_of_counters(last.rollouts)
    return found


def failure_lines(rollouts: Sequence[EnvironmentFailures]) -> list[str]:
    """Return lines about failed training rollouts, the worst environment first; empty where none failed."""
    lines = []
    for each in sorted(rollouts, key=lambda each: -each.share):
        if each.total:
            lines.append(_counts(each))
            for cause, first in each.first.items():
                place = f", at {first.where}" if first.where else ""
                lines.append(f"    {_cause(cause)}, the first: {first.what}{place}")
        if each.tampered:
            began = max(each.started, each.total + each.finished)
            lines.append(f"{_of(each)}{each.tampered:,} of {began:,} rollouts interfered with their judge")
        for part, count in list(each.refused_parts.items())[:_MOST_PARTS]:
            what = each.first_refused.get(part, "no finite number")
            lines.append(f"{_of(each)}part {part!r} was left out of {count:,} rewards; the first was {what}")
        if len(each.refused_parts) > _MOST_PARTS:
            lines.append(f"{_of(each)}and so were {len(each.refused_parts) - _MOST_PARTS} other parts")
    return lines


def failure_warnings(rollouts: Sequence[EnvironmentFailures]) -> dict[str, str]:
    """Return one warning for each environment whose share of failures reaches the limit, by its name."""
    found = {}
    for each in rollouts:
        if each.warns:
            cause = max(each.failed, key=lambda name: each.failed[name])
            first = each.first.get(cause)
            place = f" at {first.where}" if first is not None and first.where else ""
            found[each.environment] = _counts(each) + ("" if first is None else f"; the first: {first.what}{place}")
    return found


def _counts(each: EnvironmentFailures) -> str:
    causes = sorted(each.failed.items(), key=lambda item: -item[1])
    began = max(each.started, each.total + each.finished)
    what = ", ".join(f"{count:,} {_cause(cause)}" for cause, count in causes)
    return f"{_of(each)}{each.total:,} of {began:,} rollouts failed ({each.share:.1%}): {what}"


def _of(each: EnvironmentFailures) -> str:
    return f"environment {each.environment}: " if each.environment else ""


def _cause(cause: str) -> str:
    try:
        return FailureCause(cause).words
    except ValueError:  # of a later version
        return cause


def mean_words(mean: float, count: int) -> str:
    """Return a mean with the number of rollouts that it is over, where that is known."""
    return number(mean) + (f" of {count:,}" if count else "")


def heldout_words(evaluation: Evaluation) -> str:
    """Return a held-out reward, its number of rollouts, and how many failed."""
    return mean_words(evaluation.reward, evaluation.count) + failed_heldout(evaluation)


def set_words(evaluation: SetEvaluation) -> str:
    """Return the result of an evaluation of a set: mean with its interval, pass@k, truncated and failed rollouts."""
    words = [f"reward {_interval(evaluation.mean)} of {evaluation.prompts:,} prompts"]
    if evaluation.samples_per_prompt > 1:
        words[0] += f" x {evaluation.samples_per_prompt}"
    shown = [key for key in ("1", str(evaluation.samples_per_prompt)) if key in evaluation.pass_at]
    words += [f"pass@{k} {_interval(evaluation.pass_at[k])}" for k in dict.fromkeys(shown)]
    if evaluation.truncated:
        words.append(f"{evaluation.truncated:,} truncated")
    if evaluation.failed:
        how = "counted as 0" if evaluation.failures == "zero" else "not counted"
        words.append(f"{evaluation.failed:,} failed, {how}")
    return ", ".join(words)


def _interval(mean: MeanOfPrompts) -> str:
    if mean.value is None:
        return "-"
    if mean.low is None or mean.high is None:
        return number(mean.value)
    return f"{number(mean.value)} [{number(mean.low)}, {number(mean.high)}]"


def failed_heldout(evaluation: Evaluation, *, short: bool = False) -> str:
    """Return how many held-out rollouts failed, and how they count, as a suffix; empty where none failed."""
    if not evaluation.failed:
        return ""
    if short:
        return f", {evaluation.failed:,} failed"
    how = "counted as 0" if evaluation.failures == "zero" else "not counted"
    return f" ({evaluation.failed:,} failed, {how})"
