"""Series of a run for pages and comparisons: the records of its steps, its evaluations, and intervals of means."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from operator import attrgetter

from hpcrl.analysis.student import student_quantile
from hpcrl.runs.events import Event, read_events
from hpcrl.runs.metrics import StepRecord, read_metrics
from hpcrl.runs.observe import RunView, observe
from hpcrl.runs.run_progress import Evaluation, SetEvaluation, valid_evaluations, valid_set_evaluations
from hpcrl.runs.rundir import RunDir

MOST_POINTS = 800
"""Maximum points of a line on a page; `thinned` keeps the extremes of longer ones."""
_SMOOTH_SHARE = 0.05


@dataclass(frozen=True)
class RunHistory:
    """Files of a run, each read once.

    Attributes
    ----------
    records:
        Steps that belong to the history of the run, ascending.
    evaluations, sets:
        Held-out evaluations, and those of sets, in version order.
    events:
        All events in time order.
    """

    run: RunDir
    view: RunView
    records: list[StepRecord]
    evaluations: list[Evaluation]
    sets: list[SetEvaluation]
    events: list[Event]

    @property
    def name(self) -> str:
        """Return the name of the run."""
        return self.view.name

    def of_kind(self, *kinds: str) -> list[Event]:
        """Return the events of some kinds in time order."""
        return [event for event in self.events if event.kind in kinds]

    def step_at(self, time_s: float) -> float:
        """Return the place of a time on an axis of steps: a step ends at its number, and time within it is a fraction.

        Times before the first record are 0 or more, and those after the last one are at its step.
        """
        if not self.records:
            return 0.0
        index = bisect_left(self.records, time_s, key=lambda record: record.time_s)
        if index == len(self.records):
            return float(self.records[-1].step)
        record = self.records[index]
        seconds = max(sum(record.phases_s.values()), 1e-9)
        return record.step - min(1.0, (record.time_s - time_s) / seconds)


def read_history(run: RunDir) -> RunHistory:
    """Read the files of a run, whether it has ended or not.

    Raises
    ------
    RunDirError
        The directory is not a run.
    """
    view, events = observe(run), read_events(run)
    return RunHistory(
        run=run,
        view=view,
        records=read_metrics(run),
        evaluations=valid_evaluations(run, [event for event in events if event.kind == "evaluation"]),
        sets=valid_set_evaluations(run, [event for event in events if event.kind == "evaluation.set"]),
        events=events,
    )


@dataclass(frozen=True)
class Line:
    """A line over steps.

    Attributes
    ----------
    label:
        Name in the legend; empty where the run alone is meant.
    xs, ys:
        Steps or versions, and values. None: unknown there.
    lows, highs:
        Ends of intervals; empty without.
    note:
        Meaning of the interval, with its method and numbers.
    """

    label: str
    xs: Sequence[float]
    ys: Sequence[float | None]
    lows: Sequence[float | None] = field(default=())
    highs: Sequence[float | None] = field(default=())
    note: str = ""

    @property
    def known(self) -> int:
        """Return the number of known values."""
        return len(self.ys) - self.ys.count(None)


def line_of(records: Sequence[StepRecord], value: Callable[[StepRecord], float | None], label: str = "") -> Line:
    """Return a line of one number of each step; numbers that are not finite are unknown."""
    return Line(label, steps_of(records), known_values(map(value, records)))


def lines_of(records: Sequence[StepRecord], values: Callable[[StepRecord], Mapping[str, float]]) -> list[Line]:
    """Return a line for each name of a mapping that steps have."""
    found, steps = [values(record) for record in records], steps_of(records)
    names = sorted(set[str]().union(*found))
    return [Line(name, steps, known_values([each.get(name) for each in found])) for name in names]


def steps_of(records: Iterable[StepRecord]) -> list[float]:
    """Return the numbers of steps."""
    return list(map(attrgetter("step"), records))


def known(value: float | None) -> float | None:
    """Return a finite number; None in place of any other."""
    return None if value is None or not math.isfinite(value) else float(value)


def known_values(values: Iterable[float | None]) -> list[float | None]:
    """Return `known` of each value."""
    # without a call for each value: a page of a long run has hundreds of thousands
    return [None if value is None or not math.isfinite(value) else float(value) for value in values]


def smoothed(line: Line) -> Line:
    """Return the centred moving mean over a tenth of the steps, narrower at both ends; unknown values are left out."""
    radius = max(1, round(len(line.ys) * _SMOOTH_SHARE))
    sums = _window_sums([value or 0.0 for value in line.ys], radius)
    counts = _window_sums([value is not None for value in line.ys], radius)
    means = [total / count if count else None for total, count in zip(sums, counts, strict=True)]
    return Line(line.label, line.xs, means)


def _window_sums(values: Sequence[float], radius: int) -> list[float]:
    """Return the sum of the values at most ``radius`` places away from each place: differences of running sums."""
    sums = [0.0, *accumulate(values)]
    outside = min(radius, len(values))
    ends = sums[radius + 1 :] + [sums[-1]] * outside
    begins = [0.0] * outside + sums[: len(values) - outside]
    return [end - begin for end, begin in zip(ends, begins, strict=True)]


def thinned(line: Line, most: int = MOST_POINTS) -> Line:
    """Return a line with at most ``most`` points: of each part of a longer one its lowest and its highest value.

    A single step that stands out therefore stays on the picture.
    """
    if len(line.xs) <= most:
        return line
    ys, kept = list(line.ys), list[int]()
    for begin, end in pairwise(_edges(len(ys), most // 2)):
        part = ys[begin:end]
        there = [value for value in part if value is not None]
        if not there:
            kept.append(begin)
            continue
        low, high = begin + part.index(min(there)), begin + part.index(max(there))
        kept += [low] if low == high else [low, high] if low < high else [high, low]

    def chosen(values: Sequence[float | None]) -> list[float | None]:
        return [values[i] for i in kept] if values else []

    return Line(
        line.label, [line.xs[i] for i in kept], chosen(line.ys), chosen(line.lows), chosen(line.highs), line.note
    )


def averaged(line: Line, most: int = MOST_POINTS) -> Line:
    """Return a line with at most ``most`` points, each the mean of consecutive known values, for values that add up.

    Unlike those of `thinned`, the points of several lines of equal steps are at equal places.
    """
    if len(line.xs) <= most:
        return line
    ys: list[float | None] = []
    edges = _edges(len(line.xs), most)
    for begin, end in pairwise(edges):
        there = [value for value in line.ys[begin:end] if value is not None]
        ys.append(sum(there) / len(there) if there else None)
    xs = [sum(line.xs[begin:end]) / (end - begin) for begin, end in pairwise(edges)]
    return Line(line.label, xs, ys, note=line.note)


def _edges(count: int, parts: int) -> list[int]:
    """Return where parts of about equal size begin, and the end of the last one."""
    return [round(i * count / parts) for i in range(parts + 1)]


@dataclass(frozen=True, slots=True)
class MeanInterval:
    """Mean of some numbers, the ends of its interval of 95 % (None for fewer than two numbers), and how many."""

    mean: float
    low: float | None
    high: float | None
    count: int


def interval_of_sums(count: int, total: float, squares: float) -> MeanInterval:
    """Return the mean of independent numbers with Student's interval of 95 %.

    Parameters
    ----------
    count, total, squares:
        Number of the numbers, their sum, and the sum of their squares.

    Raises
    ------
    ValueError
        There are no numbers.
    """
    if count < 1:
        raise ValueError("a mean needs a number")
    mean = total / count
    if count < 2:
        return MeanInterval(mean, None, None, count)
    variance = max(0.0, squares - count * mean * mean) / (count - 1)
    half = student_quantile(count - 1) * math.sqrt(variance / count)
    return MeanInterval(mean, mean - half, mean + half, count)
