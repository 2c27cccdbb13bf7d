"""Hours that a run held its allocation until a moment, all attempts together."""

from __future__ import annotations

from typing import NamedTuple

from hpcrl.runs.observe import RunView, observe
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.views.usage import attempt_spans, recorded_span


class HeldHours(NamedTuple):
    """Time in which the attempts of a run held nodes.

    Attributes
    ----------
    spans:
        Begin and end of each attempt's supervisor, in seconds since the epoch.
    gpus:
        GPUs of the allocation; 0 for a run without GPUs.
    """

    spans: tuple[tuple[float, float], ...]
    gpus: int

    def until(self, time_s: float) -> float | None:
        """Return the hours held until ``time_s``; None where no attempt is on record."""
        if not self.spans:
            return None
        return sum(max(0.0, min(end_s, time_s) - begin_s) for begin_s, end_s in self.spans) / 3600.0

    @property
    def wall_h(self) -> float | None:
        """Return the hours held so far; None where no attempt is on record."""
        return self.until(max((end_s for _, end_s in self.spans), default=0.0))

    def gpu_hours(self, hours: float | None) -> float | None:
        """Return the GPU-hours of some hours; None where they are unknown, or the run has no GPUs."""
        return None if hours is None or not self.gpus else hours * self.gpus


def read_held_hours(run: RunDir, view: RunView | None = None) -> HeldHours:
    """Return the spans of a run's attempts, without the time in the queue, as ``hpcrl status`` counts them."""
    view = observe(run) if view is None else view
    return HeldHours(tuple(attempt_spans(run, view).values()), run.plan().layout.gpus)


def recorded_hours(run: RunDir) -> HeldHours:
    """Return the spans by the events of supervisors alone: the newest attempt ends with its last event.

    Neither Slurm nor the process of the supervisor is asked.
    """
    spans = [span for number in run.attempts() if (span := recorded_span(run, number)) is not None]
    return HeldHours(tuple(spans), run.plan().layout.gpus)
