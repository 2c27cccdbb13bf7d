"""Step records as flat mappings of finite numbers, for sinks."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from hpcrl.runs.metrics import StepRecord
from hpcrl.runs.run_progress import Evaluation


def flat_metrics(record: StepRecord) -> dict[str, float]:
    """Return the numbers of a record by name, what is below a name behind a ``/``; without what is not known."""
    return dict(_numbers("", msgspec.structs.asdict(record)))


def flat_evaluation(evaluation: Evaluation) -> dict[str, float]:
    """Return the numbers of a held-out evaluation by name, and its time as ``time_s``."""
    values = {
        "heldout_reward": evaluation.reward,
        "heldout_count": evaluation.count,
        "heldout_failed": evaluation.failed,
        "heldout_by_env": evaluation.by_env,
        "heldout_parts": evaluation.parts,
    }
    moment = {"time_s": evaluation.time_s} if evaluation.time_s > 0.0 else {}
    return {**moment, **dict(_numbers("", values))}


def moment_of(metrics: Mapping[str, float]) -> float:
    """Return the time of a step or of an evaluation in seconds since the epoch; now where it is unknown."""
    return metrics.get("time_s", 0.0) or time.time()


def without_time(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics without their time: as a curve over versions it says nothing."""
    return {name: value for name, value in metrics.items() if name != "time_s"}


def _numbers(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(f"{prefix}{name}/", value)
        elif isinstance(value, int | float) and name != "step" and math.isfinite(value):
            yield f"{prefix}{name}", float(value)
