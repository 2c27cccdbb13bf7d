"""The picture of a simulation: step times, phases, staleness, KV."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from hpcrl.errors import MissingExtraError
from hpcrl.simulation.results.result import SimulationResult
from hpcrl.storage.files import atomic_write

#: Okabe and Ito's palette, the same colours as in the picture of a run
_COLOURS = {
    "wait_batch": "#D55E00",
    "forward_backward": "#0072B2",
    "optimizer": "#56B4E9",
    "publish": "#CC79A7",
    "checkpoint": "#F0E442",
    "other": "#BBBBBB",
}
_BLUE, _INK = "#0072B2", "#333333"


def draw(result: SimulationResult, path: Path) -> Path:
    """Draw a result into ``path`` (MissingExtraError where matplotlib is not installed)."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - an extra, and slow to import
    except ImportError as error:
        raise MissingExtraError("report", "matplotlib") from error
    figure = Figure(figsize=(11, 7.5), dpi=140, layout="constrained")
    axes = figure.subplots(2, 2)
    _steps(axes[0, 0], result)
    _phases(axes[0, 1], result)
    _staleness(axes[1, 0], result)
    _kv(axes[1, 1], result)
    for axis in axes.flat:
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
        axis.tick_params(colors=_INK, labelsize=9)
    title = f"{result.recipe} on {result.nodes:,} nodes, simulated: {result.steps_per_minute:.3g} steps a minute"
    title += f", goodput {result.goodput.share:.0%}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, color=_INK, parse_math=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format=path.suffix.removeprefix(".") or "png")
    atomic_write(path, buffer.getvalue())
    return path


def _title(axis: Any, text: str) -> None:
    axis.set_title(text, loc="left", fontsize=11, fontweight="bold", color=_INK, parse_math=False)


def _steps(axis: Any, result: SimulationResult) -> None:
    points = result.step_series
    base = [0.0] * len(points)
    hours = [point.end_s / 3600 for point in points]
    for phase, colour in _COLOURS.items():
        seconds = [point.phases_s.get(phase, 0.0) for point in points]
        top = [low + high for low, high in zip(base, seconds, strict=True)]
        axis.fill_between(hours, base, top, color=colour, linewidth=0, step="mid")
        base = top
    axis.set_xlabel("simulated hours", color=_INK)
    _title(axis, "Seconds of each step")


def _phases(axis: Any, result: SimulationResult) -> None:
    left = 0.0
    engine = result.engine
    for phase, colour in _COLOURS.items():
        share = result.phases.get(phase, 0.0)
        axis.barh("trainer", share, left=left, color=colour, label=f"{phase} {share:.0%}" if share >= 0.005 else None)
        left += share
    left = 0.0
    shares = (("busy", engine.busy, _BLUE), ("frozen", engine.frozen, "#CC79A7"), ("idle", engine.idle, "#D55E00"))
    for name, share, colour in (*shares, ("down", engine.down, _INK)):
        axis.barh("engines", share, left=left, color=colour, label=f"engines {name} {share:.0%}")
        left += share
    axis.set_xlim(0, 1)
    axis.set_ylim(-0.6, 3.2)
    axis.legend(loc="upper left", frameon=False, fontsize=8, ncols=2)
    _title(axis, "Where time goes")


def _staleness(axis: Any, result: SimulationResult) -> None:
    histogram = result.staleness.histogram
    total = sum(histogram.values()) or 1
    lags = range(result.staleness.bound + 1)
    axis.bar([str(lag) for lag in lags], [histogram.get(str(lag), 0) / total for lag in lags], color=_BLUE)
    axis.set_xlabel(f"staleness (not used: {result.dropped_share:.1%} of rollouts)", color=_INK)
    _title(axis, "Consumed rollouts by staleness")


def _kv(axis: Any, result: SimulationResult) -> None:
    hours = [point.time_s / 3600 for point in result.kv_series]
    axis.plot(hours, [point.mean for point in result.kv_series], color=_BLUE, linewidth=1.4, label="mean")
    highest = [point.highest for point in result.kv_series]
    axis.plot(hours, highest, color="#D55E00", linewidth=0.9, alpha=0.7, label="fullest engine")
    axis.set_ylim(bottom=0)
    axis.set_xlabel("simulated hours", color=_INK)
    axis.legend(loc="lower right", frameon=False, fontsize=9, ncols=2)
    _title(axis, "KV in use (share of capacity; tokens where none is given)")
