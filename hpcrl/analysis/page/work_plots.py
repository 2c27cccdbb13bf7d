"""Plots of a page about work: lengths, throughput, drops, seconds of steps, hand-offs and checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hpcrl.analysis.finished_rollouts import length_lines
from hpcrl.analysis.page.material import Plot, RunMaterial
from hpcrl.analysis.series import Line, known, known_values, line_of, steps_of
from hpcrl.runs.metrics import StepRecord
from hpcrl.runs.views.words import PHASES

ROLLOUTS, TIME, FLEET = "Rollouts", "Time", "Engines, hand-offs, checkpoints"
DROPS = {
    "dropped_stale": "too old when finished",
    "cancelled_stale": "cancelled: would be too old",
    "dropped_zero_variance": "group without variance",
    "dropped_group": "group with too few members",
    "dropped_environment": "failed in the environment",
    "dropped_engine": "no answer of an engine",
    "dropped_branches": "too many branches",
}
"""Causes by the counters of the orchestrator (`hpcrl.rollouts.core.counters`)."""


def work_plots(runs: Sequence[RunMaterial]) -> list[Plot]:
    """Return the plots that have data, in the order of the page."""
    plots = [
        _lengths(runs),
        *_drops(runs),
        _zero_variance(runs),
        _phases(runs) if len(runs) == 1 else _steps(runs),
        _throughput(runs),
        _repeated_requests(runs),
        _updates(runs),
        _checkpoints(runs),
    ]
    return [plot for plot in plots if plot.lines]


def _lengths(runs: Sequence[RunMaterial]) -> Plot:
    plot = Plot("lengths", "Length of rollouts", "sampled tokens", ("page/sampled_length",), ROLLOUTS)
    for number, each in enumerate(runs):
        records = each.history.records
        mean = line_of(
            records, lambda record: record.sampled_tokens / record.reward_count if record.reward_count else None, "mean"
        )
        plot.add(number, [mean], "bold")
        # with several runs quantiles would hide the means
        if len(runs) == 1:
            plot.add(number, length_lines(each.finished), "faint")
    return plot


def _drops(runs: Sequence[RunMaterial]) -> list[Plot]:
    """Return one plot by cause for one run, and one of all causes for several."""
    plot = Plot("drops", "Dropped rollouts by cause", "rollouts a step", ("page/drops",), ROLLOUTS, kind="stack")
    if len(runs) == 1:
        plot.add(0, [counted(runs[0].history.records, (name,), words) for name, words in DROPS.items()])
        plot.lines = [each for each in plot.lines if any(each[2].ys)]
        if not plot.lines and runs[0].history.records:
            plot.add(0, [counted(runs[0].history.records, tuple(DROPS), "none was dropped")])
        return [plot]
    plot.title, plot.kind = "Dropped rollouts, all causes", "lines"
    for number, each in enumerate(runs):
        plot.add(number, [counted(each.history.records, tuple(DROPS), "")])
    return [plot]


def counted(records: Sequence[StepRecord], names: Sequence[str], label: str) -> Line:
    """Return the increase of counters of the orchestrator in each step.

    The counters continue from a checkpoint after a restart; where one is smaller than before, that step counts from it.
    """
    if not any(record.rollouts for record in records):
        return Line(label, [], [])
    columns = [[record.rollouts.get(name, 0.0) for record in records] for name in names]
    steps, totals = steps_of(records), columns[0]
    if len(columns) > 1:
        totals = [sum(values) for values in zip(*columns, strict=True)]
    if not any(totals):  # as most causes in most runs
        return Line(label, steps, totals)
    increases = [totals[0], *(after - before if after >= before else after for before, after in pairwise(totals))]
    return Line(label, steps, known_values(increases))


def _zero_variance(runs: Sequence[RunMaterial]) -> Plot:
    plot = Plot("zero-variance", "Groups without variance", "groups a step", ("page/zero_variance",), ROLLOUTS)
    for number, each in enumerate(runs):
        plot.add(number, [counted(each.history.records, ("zero_variance_groups",), "")])
    return plot


def _phases(runs: Sequence[RunMaterial]) -> Plot:
    plot = Plot("phases", "Seconds of each step by phase", "s", ("page/steps_s", "phases_s/"), TIME, kind="stack")
    records = runs[0].history.records
    steps = steps_of(records)
    for phase, (words, _) in PHASES.items():
        line = Line(words, steps, [record.phases_s.get(phase, 0.0) for record in records])
        if any(line.ys):
            plot.add(0, [line])
    return plot


def _steps(runs: Sequence[RunMaterial]) -> Plot:
    plot = Plot("phases", "Seconds of each step", "s", ("page/steps_s",), TIME)
    for number, each in enumerate(runs):
        plot.add(number, [line_of(each.history.records, lambda record: sum(record.phases_s.values()), "")])
    return plot


def _throughput(runs: Sequence[RunMaterial]) -> Plot:
    plot = Plot("throughput", "Throughput", "tokens/s", ("tokens_per_s",), TIME)
    for number, each in enumerate(runs):
        plot.add(number, [line_of(each.history.records, lambda record: record.tokens_per_s)])
    return plot


def _repeated_requests(runs: Sequence[RunMaterial]) -> Plot:
    plot = Plot(
        "repeated-requests", "Requests that were made again", "requests a step", ("page/repeated_requests",), FLEET
    )
    for number, each in enumerate(runs):
        # a run whose engines never failed has no such plot
        if any(record.rollouts.get("engine_retries") for record in each.history.records):
            plot.add(number, [counted(each.history.records, ("engine_retries",), "")])
    return plot


def _updates(runs: Sequence[RunMaterial]) -> Plot:
    plot = Plot("updates", "Weight updates of engines", "s", ("page/update_s", "page/pause_s"), FLEET)
    for number, each in enumerate(runs):
        slowest: dict[int, list[float]] = {}
        for event in each.history.of_kind("engine.weights_updated"):
            version, seconds = event.data.get("version"), event.data.get("seconds")
            if isinstance(version, int) and isinstance(seconds, int | float):
                pause = event.data.get("pause_s")
                there = slowest.setdefault(version, [0.0, 0.0])
                there[0] = max(there[0], float(seconds))
                there[1] = max(there[1], float(pause) if isinstance(pause, int | float) else 0.0)
        xs = sorted(slowest)
        plot.add(number, [Line("slowest engine", xs, [slowest[x][0] for x in xs])], "bold")
        plot.add(number, [Line("longest pause", xs, [slowest[x][1] for x in xs])], "faint")
    return plot


def _checkpoints(runs: Sequence[RunMaterial]) -> Plot:
    plot = Plot("checkpoints", "Checkpoints", "s", ("page/checkpoint_s",), FLEET)
    for number, each in enumerate(runs):
        saved = {}
        for event in each.history.of_kind("trainer.checkpoint_saved"):
            if isinstance(event.data.get("step"), int):
                saved[event.data["step"]] = event.data
        steps = sorted(saved)
        for name, words in (("seconds", "whole save"), ("blocked_s", "training blocked")):
            plot.add(number, [Line(words, steps, [known(saved[step].get(name)) for step in steps])], "points")
    return plot
