"""Comparison of runs as text within 100 columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpcrl.analysis.comparison.compared import Axis, Comparison, EqualCost
from hpcrl.analysis.comparison.measured_run import HeldOutPoint, MeasuredRun
from hpcrl.analysis.comparison.noise import NoiseVerdict
from hpcrl.runs.views.words import duration, number

WIDTH = 100
_KEY = 34
"""Width of the first column."""
_BLOCK = 4
"""Maximum runs next to each other."""
_UNKNOWN = "unknown"
_AXES: dict[Axis, str] = {
    "steps": "step {:,.0f}",
    "tokens": "{:,.0f} tokens",
    "gpu_hours": "{:,.3g} GPU-hours",
    "hours": "{:,.3g} hours",
}


def comparison_lines(found: Comparison) -> Iterator[str]:
    """Yield the lines of a comparison, none longer than `WIDTH`."""
    runs = found.runs
    for run in runs:
        yield _cut(f"{run.label}  {run.name}  {run.state}", WIDTH)
    for first in range(0, len(runs), _BLOCK):
        block = range(first, min(first + _BLOCK, len(runs)))
        yield ""
        yield from _block(found, block)
    for title, lines in (("more than noise?", _verdicts(found)), ("notes", found.notes)):
        if lines:
            yield ""
            yield title
        for line in lines:
            yield from _wrapped(line)


def _block(found: Comparison, block: range) -> Iterator[str]:
    """Yield the tables of at most `_BLOCK` runs."""
    runs = [found.runs[number] for number in block]
    width = (WIDTH - _KEY) // len(block) - 2

    def row(name: str, values: Sequence[str]) -> str:
        cells = "".join(f"  {_cut(value, width):<{width}}" for value in values)
        return f"{_cut(name, _KEY):<{_KEY}}{cells}".rstrip()

    yield row("", [run.label for run in runs])
    if found.differences:
        for each in found.differences:
            yield row(_tail(each.key), [each.values[number] for number in block])
    else:
        yield "settings, code and versions are the same, as far as they are known"
    yield ""
    for equal in found.equal:
        yield row(_equal_name(equal), [_reward(equal.points[number]) for number in block])
    if found.reward is not None:
        points = [found.reward.points[number] for number in block]
        target = number_words(found.reward.reward)
        yield row(f"steps to {target}", [_reached(point, run) for point, run in zip(points, runs, strict=True)])
        for name, values in _costs(points, runs):
            yield row(f"  {name}", values)
    yield ""
    for name, values in _figures(runs):
        yield row(name, values)


def number_words(value: float | None) -> str:
    """Return a reward with three decimals; ``unknown`` for None."""
    return _UNKNOWN if value is None else number(value)


def _equal_name(equal: EqualCost) -> str:
    if equal.at is None:
        return f"held-out at equal {equal.axis.replace('gpu_hours', 'GPU-hours')}"
    return f"held-out at {_AXES[equal.axis].format(equal.at)}"


def _reward(point: HeldOutPoint | None) -> str:
    if point is None:
        return _UNKNOWN
    interval = "" if point.low is None else f" [{number(point.low, '.2f')} {number(point.high, '.2f')}]"
    return f"{number(point.reward)}{interval} of {point.count:,}"


def _reached(point: HeldOutPoint | None, run: MeasuredRun) -> str:
    if point is not None:
        return f"{point.step:,}"
    best = max((each.reward for each in run.points), default=None)
    return _UNKNOWN if best is None else f"not reached, best {number(best)}"


def _costs(points: Sequence[HeldOutPoint | None], runs: Sequence[MeasuredRun]) -> Iterator[tuple[str, list[str]]]:
    yield "tokens", ["-" if p is None else _count(p.tokens) for p in points]
    yield "time", ["-" if p is None else _UNKNOWN if p.hours is None else duration(3600 * p.hours) for p in points]
    if any(run.gpu_hours is not None for run in runs):
        yield "GPU-hours", ["-" if p is None else _float(p.gpu_hours) for p in points]


def _figures(runs: Sequence[MeasuredRun]) -> Iterator[tuple[str, list[str]]]:
    yield "steps", [f"{run.steps:,}" + ("" if run.total_steps is None else f" of {run.total_steps:,}") for run in runs]
    yield "tokens", [_count(run.tokens) for run in runs]
    yield "time, all attempts", [_UNKNOWN if run.hours is None else duration(3600 * run.hours) for run in runs]
    yield "GPU-hours", [_float(run.gpu_hours) if run.gpu_hours is not None else "no GPUs" for run in runs]
    yield "seconds of a step, median", [_float(run.step_s) for run in runs]
    yield "  waiting for rollouts", [_UNKNOWN if run.waiting is None else f"{run.waiting:.0%}" for run in runs]
    yield "rollouts started", [_count(run.started) for run in runs]
    yield from _counts("dropped", [run.drops for run in runs], [run.started for run in runs])
    yield from _counts("failed", [run.failures for run in runs], [None] * len(runs))
    yield "attempts", [f"{run.attempts:,}" for run in runs]
    yield from _counts("faults", [run.faults for run in runs], [None] * len(runs))


def _counts(
    title: str, sides: Sequence[dict[str, int] | None], of: Sequence[int | None]
) -> Iterator[tuple[str, list[str]]]:
    """Yield a row with the sum, and one for each cause that a run has."""
    yield title, [_UNKNOWN if side is None else f"{sum(side.values()):,}" for side in sides]
    for cause in dict.fromkeys(cause for side in sides for cause in side or ()):
        values = []
        for side, total in zip(sides, of, strict=True):
            count = None if side is None else side.get(cause, 0)
            share = f" ({count / total:.1%})" if count and total else ""
            values.append(_count(count) + share)
        yield f"  {cause}", values


def _verdicts(found: Comparison) -> list[str]:
    return [verdict_words(verdict) for verdict in found.noise]


def verdict_words(verdict: NoiseVerdict) -> str:
    """Return a verdict in a sentence: difference, interval, answer, method and counts."""
    names = "{} - {}".format("+".join(verdict.second), "+".join(verdict.first))
    if verdict.difference is None or verdict.low is None or verdict.high is None:
        difference = "" if verdict.difference is None else f" {verdict.difference:+.3f}"
        return f"{names}{difference}: unknown: {verdict.method}"
    answer = {
        ("seeds", True): "more than the spread between seeds",
        ("seeds", False): "within the spread between seeds",
        ("evaluation", True): "more than the noise of evaluation; the spread between seeds is unknown",
        ("evaluation", False): "within the noise of evaluation; the spread between seeds is unknown",
    }[verdict.noise, bool(verdict.more_than_noise)]
    interval = f"[{verdict.low:+.3f}, {verdict.high:+.3f}]"
    return f"{names} {verdict.difference:+.3f} {interval} at step {verdict.step}: {answer} ({verdict.method})"


def _count(value: int | None) -> str:
    return _UNKNOWN if value is None else f"{value:,}"


def _float(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:,.3g}"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _tail(key: str) -> str:
    """Return a dotted name that fits: its end says most."""
    return key if len(key) <= _KEY else f"…{key[1 - _KEY :]}"


def _wrapped(text: str) -> Iterator[str]:
    """Break a sentence at blanks, its further lines indented."""
    line = "  "
    for word in text.split():
        if len(line) + len(word) + 1 > WIDTH and line.strip():
            yield line.rstrip()
            line = "    "
        line += word + " "
    yield line.rstrip()
