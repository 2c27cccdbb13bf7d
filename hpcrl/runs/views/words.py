"""Words and colours that several views of a run share."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.text import Text

if TYPE_CHECKING:
    from hpcrl.runs.metrics import StepRecord
    from hpcrl.runs.run_progress import Progress

_STYLES = {
    "RUNNING": "green",
    "READY": "green",
    "COMPLETED": "bold green",
    "EXITED": "dim",
    "STARTING": "yellow",
    "QUEUED": "dim",
    "SUBMITTED": "yellow",
    "STOPPING": "yellow",
    "REQUEUED": "yellow",
    "PENDING": "dim",
    "CANCELLED": "yellow",
    "FAILED": "bold red",
    "LOST": "bold red",
}
#: phases in the order of a step, with a colour each
PHASES = {
    "wait_batch": ("waiting", "red"),
    "forward_backward": ("forward+backward", "blue"),
    "optimizer": ("optimizer", "cyan"),
    "publish": ("publish", "magenta"),
    "swap": ("swap", "green"),
    "checkpoint": ("checkpoint", "yellow"),
    "held_out": ("held-out loss", "green"),
    "other": ("other", "white"),
}


def number(value: float | None, spec: str = ".3f") -> str:
    """Format a number; ``-`` where it is not known."""
    return "-" if value is None or not math.isfinite(value) else format(value, spec)


def duration(seconds: float | None) -> str:
    """Return ``75`` as ``1:15``, from an hour on as ``2:01:15``; ``-`` for None."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def age(seconds: float) -> str:
    """Return an age as ``45s``, ``12m``, ``5h`` or ``3d``, in the largest unit that fits."""
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f}{unit}"
    return f"{max(0.0, seconds):.0f}s"


def state_text(state: str) -> Text:
    """Return a state in its colour."""
    return Text(state, style=_STYLES.get(state, ""))


def staleness(record: StepRecord, progress: Progress) -> str:
    """Return the mean, the maximum and the bound of the staleness of a step's rollouts (in versions), in words."""
    bound = "" if progress.staleness_bound is None else f", bound {progress.staleness_bound}"
    return f"staleness {number(record.staleness_mean, '.1f')} (largest {record.staleness_max}{bound})"
