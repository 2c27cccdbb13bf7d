"""The end of a run, for sinks: the state that the supervisor says, and a final summary by the files of the run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

from hpcrl.errors import HpcrlError
from hpcrl.runs.metrics import StepRecord, read_metrics
from hpcrl.runs.run_progress import Evaluation, read_evaluations
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunState
from hpcrl.runs.views.held_hours import recorded_hours
from hpcrl.storage.files import atomic_write

_NEWEST_STEPS = 10
"""Number of steps over which the first and the last rewards are means."""


class SinkEnd(msgspec.Struct, frozen=True, kw_only=True):
    """End of a run with an attempt; written before sinks are asked to end.

    Attributes
    ----------
    state:
        ``COMPLETED``, ``FAILED`` or ``CANCELLED``.
    """

    state: RunState


def write_end(run: RunDir, attempt: int, end: SinkEnd) -> None:
    """Write it; sinks of that attempt read it when they are asked to end (OSError where it cannot be written)."""
    atomic_write(_path(run, attempt), msgspec.json.encode(end), durable=False)


def read_end(run: RunDir, attempt: int) -> SinkEnd | None:
    """Return the end of the run with an attempt; None where another attempt follows, or nothing is known."""
    try:
        return msgspec.json.decode(_path(run, attempt).read_bytes(), type=SinkEnd)
    except (OSError, msgspec.DecodeError):
        return None


def final_summary(run: RunDir) -> dict[str, float]:
    """Return the final numbers of a run, without those that are unknown.

    ``steps``, ``attempts``; ``reward_first`` and ``reward_last``, means over the first and the last ten steps;
    ``heldout_first``, ``heldout_last`` and ``heldout_best``, and the rollouts that the last two are over
    (``heldout_last_count``, ``heldout_best_count``); ``wall_hours`` and ``gpu_hours``, which the attempts held.
    """
    try:
        records, hours = read_metrics(run), recorded_hours(run)
        heldout = [each for each in read_evaluations(run) if math.isfinite(each.reward)]
    except (HpcrlError, OSError):
        return {}
    found = {
        "steps": float(records[-1].step if records else 0),
        "attempts": float(len(run.attempts())),
        "reward_first": _mean_reward(records[:_NEWEST_STEPS]),
        "reward_last": _mean_reward(records[-_NEWEST_STEPS:]),
        **_heldout_numbers(heldout),
        "wall_hours": hours.wall_h,
        "gpu_hours": hours.gpu_hours(hours.wall_h),
    }
    return {name: value for name, value in found.items() if value is not None}


def _heldout_numbers(evaluations: Sequence[Evaluation]) -> dict[str, float]:
    if not evaluations:
        return {}
    last, best = evaluations[-1], max(evaluations, key=lambda each: each.reward)
    counts = {"heldout_last_count": last.count, "heldout_best_count": best.count}
    rewards = {"heldout_first": evaluations[0].reward, "heldout_last": last.reward, "heldout_best": best.reward}
    # 0 in evaluations of earlier versions: unknown
    return rewards | {name: float(count) for name, count in counts.items() if count}


def _path(run: RunDir, attempt: int) -> Path:
    return run.attempt_dir(attempt) / "sinks_end.json"


def _mean_reward(records: Sequence[StepRecord]) -> float | None:
    rewards = [record.reward_mean for record in records if math.isfinite(record.reward_mean)]
    return math.fsum(rewards) / len(rewards) if rewards else None
