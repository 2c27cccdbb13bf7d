"""Picture of a run: reward, staleness, and the durations of the phases of each step."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from hpcrl.errors import MissingExtraError, UsageError
from hpcrl.runs.metrics import StepRecord, read_metrics
from hpcrl.runs.observe import RunView, observe
from hpcrl.runs.run_progress import Evaluation, Progress, read_progress
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.views.failures import failure_lines, heldout_words
from hpcrl.runs.views.supervised import draw_losses, draw_rates, is_supervised
from hpcrl.runs.views.words import PHASES, duration, number
from hpcrl.storage.files import atomic_write

REPORT_NAME = "report.png"
#: Okabe and Ito's palette, which people with any colour vision can tell apart
_COLOURS = {
    "wait_batch": "#D55E00",
    "forward_backward": "#0072B2",
    "optimizer": "#56B4E9",
    "publish": "#CC79A7",
    "swap": "#009E73",
    "checkpoint": "#F0E442",
    "held_out": "#009E73",
    "other": "#BBBBBB",
}
_INK, _FAINT, _TRAIN, _HELD_OUT = "#333333", "#9AA5B1", "#0072B2", "#D55E00"
_FAILURE_LINES = 4
_LINE = 130
"""Maximum characters of a line of text in the picture."""
_SMOOTH_SHARE = 0.05
"""Share of the run's steps, to each side, over which the bold reward line is a mean."""


def write_report(run: RunDir, path: Path | None = None) -> Path:
    """Draw the picture of a run, finished or not; return its path.

    Parameters
    ----------
    run:
        The run.
    path:
        A file that matplotlib can write (PNG, SVG, PDF by its ending); ``report.png`` in the run by default.

    Raises
    ------
    MissingExtraError
        matplotlib is not installed.
    UsageError
        The run has no step yet, or the ending of ``path`` names no known format.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - an extra, and slow to import
    except ImportError as error:
        raise MissingExtraError("report", "matplotlib") from error
    metrics = read_metrics(run)
    if not metrics:
        raise UsageError(f"{run.name} has no step yet, so there is nothing to plot")
    view, progress = observe(run), read_progress(run)
    path = run.path / REPORT_NAME if path is None else path
    figure = Figure(figsize=(10, 10.5), dpi=140, layout="constrained")
    axes = figure.subplots(3, 1, sharex=True, height_ratios=(3, 1.6, 2.4))
    if is_supervised(metrics[-1]):
        draw_losses(axes[0], metrics, train=_TRAIN, held_out=_HELD_OUT)
        draw_rates(axes[1], metrics, train=_TRAIN)
    else:
        _draw_reward(axes[0], metrics, progress)
        _draw_staleness(axes[1], metrics, run.recipe().rollouts.max_off_policy_steps)
    _draw_phases(axes[2], metrics)
    for axis in axes:
        _tidy(axis)
    axes[-1].set_xlabel("optimizer step", color=_INK)
    axes[-1].set_xlim(min(0, metrics[0].step - 0.5), metrics[-1].step + 0.5)
    title = _title(view, progress, metrics)
    # a dollar sign in a name must not begin a formula
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, color=_INK, parse_math=False)
    buffer = io.BytesIO()
    try:
        figure.savefig(buffer, format=path.suffix.removeprefix(".") or "png")
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error
    atomic_write(path, buffer.getvalue())
    return path


def _title(view: RunView, progress: Progress, metrics: list[StepRecord]) -> str:
    seconds = sum(sum(record.phases_s.values()) for record in metrics)
    parts = [f"{view.state}", f"{progress.steps} of {progress.total_steps} steps", f"{duration(seconds)} of training"]
    if view.attempts > 1:
        parts.append(f"{view.attempts} attempts")
    return "\n".join([view.name, " · ".join(parts), *(_shortened(line) for line in _failures(progress))])


def _failures(progress: Progress) -> list[str]:
    """Return lines about failed rollouts, in training and in the newest evaluation."""
    lines = failure_lines(progress.rollouts)[:_FAILURE_LINES]
    if progress.evaluations and progress.evaluations[-1].failed:
        newest = progress.evaluations[-1]
        lines.append(f"held-out after step {newest.version}: {heldout_words(newest)}")
    return lines


def _shortened(line: str) -> str:
    """Cut a line to the width of the picture, and remove what matplotlib reads as a formula."""
    cut = line if len(line) <= _LINE else f"{line[: _LINE - 1]}…"
    return cut.replace("$", r"\$")


def _draw_reward(axis: Any, metrics: list[StepRecord], progress: Progress) -> None:
    steps = [record.step for record in metrics]
    rewards = [record.reward_mean for record in metrics]
    counts = {record.reward_count for record in metrics if record.reward_count}
    over = f" of {_span(counts)} rollouts" if counts else ""
    axis.plot(steps, rewards, color=_TRAIN, alpha=0.3, linewidth=1, label=f"training, each step{over}")
    axis.plot(steps, _smooth(rewards), color=_TRAIN, linewidth=2.2, label="training, smoothed")
    evaluations = progress.evaluations
    if evaluations:
        versions = [evaluation.version for evaluation in evaluations]
        values = [evaluation.reward for evaluation in evaluations]
        axis.plot(
            versions, values, "o-", color=_HELD_OUT, linewidth=1.4, markersize=5, label=_heldout_label(evaluations)
        )
        ends = (
            [(versions[0], values[0])] if len(values) == 1 else [(versions[0], values[0]), (versions[-1], values[-1])]
        )
        for version, value in ends:
            axis.annotate(
                number(value, ".2f"),
                (version, value),
                textcoords="offset points",
                xytext=(0, -14),
                ha="left" if version == versions[0] else "right",
                fontsize=10,
                fontweight="bold",
                color=_HELD_OUT,
                bbox={"facecolor": "white", "alpha": 0.7, "edgecolor": "none", "pad": 0.5},
            )
    axis.margins(y=0.12)
    axis.legend(loc="upper left", frameon=False, fontsize=9, ncols=3)
    axis.set_title("Reward", loc="left", fontsize=11, fontweight="bold", color=_INK)


def _heldout_label(evaluations: Sequence[Evaluation]) -> str:
    """Return a label with the number of rollouts in the held-out means."""
    counts = {evaluation.count for evaluation in evaluations if evaluation.count}
    return f"held-out, each of {_span(counts)}" if counts else "held-out"


def _span(counts: set[int]) -> str:
    return f"{min(counts):,}" if len(counts) == 1 else f"{min(counts):,} to {max(counts):,}"


def _draw_staleness(axis: Any, metrics: list[StepRecord], bound: int) -> None:
    steps = [record.step for record in metrics]
    mean = [record.staleness_mean for record in metrics]
    worst = [record.staleness_max for record in metrics]
    axis.fill_between(steps, worst, step="mid", color=_TRAIN, alpha=0.15, linewidth=0, label="oldest rollout")
    axis.plot(steps, mean, color=_TRAIN, linewidth=1.8, label="mean")
    axis.axhline(bound, color=_FAINT, linewidth=1, linestyle="--")
    axis.annotate(
        f"max_off_policy_steps = {bound}",
        (1, bound),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        xytext=(-4, 3),
        ha="right",
        fontsize=8,
        color=_FAINT,
    )
    axis.set_ylim(0, max(bound, *worst) * 1.25 + 0.25)
    axis.yaxis.get_major_locator().set_params(integer=True)
    axis.legend(loc="upper left", frameon=False, fontsize=9, ncols=2)
    axis.set_title(
        "Staleness of consumed rollouts, in policy versions", loc="left", fontsize=11, fontweight="bold", color=_INK
    )


def _draw_phases(axis: Any, metrics: list[StepRecord]) -> None:
    total = sum(sum(record.phases_s.values()) for record in metrics) or 1.0
    edges, bins = _bins(metrics)
    base = [0.0] * len(bins)
    for phase, (label, _) in PHASES.items():
        seconds = [record.phases_s.get(phase, 0.0) if record is not None else 0.0 for record in bins]
        top = [low + high for low, high in zip(base, seconds, strict=True)]
        if sum(seconds) > 0:
            # one area per phase, independent of the number of steps: bars for 10,000 steps take half a minute
            axis.stairs(
                top,
                edges,
                baseline=base,
                fill=True,
                color=_COLOURS[phase],
                linewidth=0,
                label=f"{label} {sum(seconds) / total:.0%}",
            )
        base = top
    # one slow step (a compilation, a checkpoint) must not flatten all others
    usual = sorted(base)[int(0.99 * (len(base) - 1))]
    axis.set_ylim(0, min(max(base), 2.0 * usual) * 1.28 or 1.0)
    axis.legend(loc="upper left", frameon=False, fontsize=9, ncols=6, columnspacing=1.2, handlelength=1.0)
    axis.set_title("Seconds of each step, by phase", loc="left", fontsize=11, fontweight="bold", color=_INK)


def _bins(metrics: list[StepRecord]) -> tuple[list[float], list[StepRecord | None]]:
    """Return the edges of bins of steps, one more than bins; a bin is None where records of steps are missing."""
    edges: list[float] = [metrics[0].step - 0.5]
    bins: list[StepRecord | None] = []
    for record in metrics:
        if record.step - 0.5 > edges[-1]:
            edges.append(record.step - 0.5)
            bins.append(None)
        edges.append(record.step + 0.5)
        bins.append(record)
    return edges, bins


def _smooth(values: list[float]) -> list[float]:
    """Return the centred moving mean; narrower at both ends."""
    radius = max(1, round(len(values) * _SMOOTH_SHARE))
    # unknown values are left out of means
    sums = [0.0, *accumulate(value if math.isfinite(value) else 0.0 for value in values)]
    counts = [0, *accumulate(int(math.isfinite(value)) for value in values)]
    windows = ((max(0, i - radius), min(len(values), i + radius + 1)) for i in range(len(values)))
    means = ((sums[end] - sums[begin], counts[end] - counts[begin]) for begin, end in windows)
    return [total / count if count else math.nan for total, count in means]


def _tidy(axis: Any) -> None:
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axis.spines[side].set_color(_FAINT)
    axis.tick_params(colors=_INK, labelsize=9)
    axis.grid(axis="y", color="#E4E7EB", linewidth=0.8)
    axis.set_axisbelow(True)
