"""Times that the planner forecast, and those that a run measured."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from hpcrl.analysis.page.material import RunMaterial
from hpcrl.analysis.page.work_plots import DROPS
from hpcrl.errors import HpcrlError
from hpcrl.runs.metrics import StepRecord

_STEADY_SHARE = 0.5
"""Share of the newest steps that count as steady."""


class PlannedTimes(NamedTuple):
    """Rows of planned and measured figures.

    Attributes
    ----------
    rows:
        Name, planned and measured value of each figure, in words; ``unknown`` where one is not known.
    why_not:
        Reason why there is no plan of times; empty where there is one.
    """

    rows: list[tuple[str, str, str]]
    why_not: str


def planned_times(material: RunMaterial) -> PlannedTimes:
    """Return planned and measured figures of the steady state of a run.

    The plan is computed again, with the calibration that hpcrl has now: a run directory has no forecast.
    """
    planned, why_not = _forecast(material)
    measured = _measured(material.history.records)
    units = {name: unit for name, _, unit in _FIGURES}
    rows = [
        (words, _shown(planned.get(name), units[name]), _shown(measured.get(name), units[name]))
        for name, words, _ in _FIGURES
        if name in planned or name in measured
    ]
    return PlannedTimes(rows, why_not)


_FIGURES = (
    ("step_s", "seconds of a step (median)", "s"),
    ("trainer_s", "trainer's seconds of a step, without waiting (median)", "s"),
    ("rollout_s", "engines' seconds for the rollouts of a step", "s"),
    ("trainer_waits", "share of a step in which the trainer waits", "%"),
    ("engines_wait", "share of a step in which engines wait", "%"),
    ("staleness", "mean staleness", "versions"),
    ("dropped", "share of rollouts that were dropped", "%"),
)


def load_planner() -> None:
    """Import the planner, and build the schema of recipes, so that the first page does not have to."""
    import hpcrl.planning.report  # noqa: F401, PLC0415 - slow
    from hpcrl.config.recipe import Recipe  # noqa: PLC0415 - slow

    Recipe.model_rebuild()


def _forecast(material: RunMaterial) -> tuple[dict[str, float], str]:
    # slow to import, and only for this table
    from hpcrl.planning.calibration.calibration_file import load_site_calibration  # noqa: PLC0415
    from hpcrl.planning.report import find_facts, make_outlook  # noqa: PLC0415

    try:
        cluster, recipe = material.run.cluster(), material.recipe
        outlook = make_outlook(recipe, cluster, load_site_calibration(cluster), find_facts(recipe))
    except (HpcrlError, OSError, ValueError) as error:
        return {}, str(error).splitlines()[0]
    loop = outlook.loop
    if loop is None:
        return {}, outlook.because or "the planner lacks a number"
    names = ("step_s", "trainer_s", "rollout_s", "trainer_waits", "engines_wait", "staleness", "dropped")
    return {name: float(getattr(loop, name)) for name in names}, ""


def _measured(records: Sequence[StepRecord]) -> dict[str, float]:
    steady = records[-max(1, round(len(records) * _STEADY_SHARE)) :] if records else []
    if not steady:
        return {}
    steps = [sum(record.phases_s.values()) for record in steady]
    waits = [record.phases_s.get("wait_batch", 0.0) for record in steady]
    found = {
        "step_s": median(steps),
        "trainer_s": median(step - wait for step, wait in zip(steps, waits, strict=True)),
        "trainer_waits": sum(waits) / max(sum(steps), 1e-9),
    }
    if any(record.staleness_histogram for record in steady):
        found["staleness"] = sum(record.staleness_mean for record in steady) / len(steady)
    counters = records[-1].rollouts
    if counters.get("started"):
        found["dropped"] = sum(counters.get(name, 0.0) for name in DROPS) / counters["started"]
    return found


def _shown(value: float | None, unit: str) -> str:
    if value is None:
        return "unknown"
    return f"{value:.1%}" if unit == "%" else f"{value:,.2f} {unit}"
