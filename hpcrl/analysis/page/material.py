"""Material of a page: what is read of each run, and plots as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hpcrl.analysis.finished_rollouts import MOST_LEDGER_BYTES, FinishedRollouts, read_finished
from hpcrl.analysis.page.marks import Mark, read_marks
from hpcrl.analysis.series import Line, RunHistory, averaged, read_history, thinned
from hpcrl.config.recipe import Recipe
from hpcrl.runs.record import RunRecord
from hpcrl.runs.rundir import RunDir

MOST_LINES = 40
"""Maximum lines of a run in a plot."""
_DIGITS = 6
"""Significant digits of numbers in the page."""
Style = Literal["plain", "faint", "bold", "points"]


@dataclass(frozen=True)
class RunMaterial:
    """A run of a page."""

    history: RunHistory
    finished: FinishedRollouts
    marks: Sequence[Mark]
    recipe: Recipe
    record: RunRecord

    @property
    def run(self) -> RunDir:
        """Return the directory of the run."""
        return self.history.run


def read_material(run: RunDir, *, most_ledger_bytes: int = MOST_LEDGER_BYTES) -> RunMaterial:
    """Read a run (RunDirError where the directory is not one).

    Parameters
    ----------
    most_ledger_bytes:
        Maximum size of a ledger of rollouts that is read.
    """
    history, finished = read_history(run), read_finished(run, most_ledger_bytes)
    return RunMaterial(history, finished, read_marks(history), run.recipe(), RunRecord.read(run))


@dataclass
class Plot:
    """A plot over steps.

    Attributes
    ----------
    id, title, unit:
        Its name in the page, and the title with its unit.
    curves:
        Names of the definitions of its curves, as in `hpcrl.analysis.page.definitions`.
    section:
        Section of the page.
    kind:
        ``lines``, or ``stack``: values of a step add up.
    lines:
        Lines with their runs and styles.
    levels:
        Horizontal lines: values and labels.
    notes:
        Sentences below the plot.
    log:
        Whether values are on a logarithmic axis.
    """

    id: str
    title: str
    unit: str
    curves: Sequence[str]
    section: str
    kind: Literal["lines", "stack"] = "lines"
    lines: list[tuple[int, Style, Line]] = field(default_factory=list)
    levels: list[tuple[float, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    log: bool = False

    def add(self, run: int, lines: Sequence[Line], style: Style = "plain") -> None:
        """Add the lines of a run that have a known value, and the notes of their intervals."""
        shown = [line for line in lines if line.known]
        if len(shown) > MOST_LINES:
            self.notes.append(f"{len(shown) - MOST_LINES} lines of {len(shown)} are left out.")
        for line in shown[:MOST_LINES]:
            self.lines.append((run, style, line))
            if line.note and line.note not in self.notes:
                self.notes.append(line.note)

    def document(self, most: int) -> dict[str, Any]:
        """Return the plot as plain values, a line with at most ``most`` points."""
        return {
            "id": self.id,
            "title": self.title,
            "unit": self.unit,
            "kind": self.kind,
            "log": self.log,
            "levels": [{"y": y, "label": label} for y, label in self.levels],
            "lines": [
                {
                    "run": run,
                    "style": style,
                    **_numbers(averaged(line, most) if self.kind == "stack" else thinned(line, most)),
                }
                for run, style, line in self.lines
            ],
        }


def _numbers(line: Line) -> dict[str, Any]:
    document: dict[str, Any] = {"label": line.label, "x": _rounded(line.xs), "y": _rounded(line.ys)}
    if any(low is not None for low in line.lows):
        document |= {"low": _rounded(line.lows), "high": _rounded(line.highs)}
    return document


def _rounded(values: Sequence[float | None]) -> list[float | None]:
    # numbers of steps stay whole
    return [value if value is None or isinstance(value, int) else float(f"{value:.{_DIGITS}g}") for value in values]
