"""``hpcrl plan diff``: what differs between two recipes or runs, and what that does to a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcrl.cli.output import markup

if TYPE_CHECKING:
    from rich.console import Console

    from hpcrl.config.cluster import ClusterProfile
    from hpcrl.config.recipe import Recipe
    from hpcrl.planning.calibration.calibration_file import Calibration
    from hpcrl.planning.report import Outlook


@dataclass(frozen=True)
class Side:
    """One input of a comparison: the name of a recipe or a run, and changes of its recipe (``key=value``)."""

    name: str
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Subject:
    """One side: a recipe on a cluster, or a run with what it measured."""

    name: str
    values: dict[str, Any]
    outlook: Outlook
    measured_step_s: float | None
    short: tuple[str, ...]
    """Shortages, a sentence each."""


@dataclass(frozen=True)
class Difference:
    """Two plans side by side, and what differs between them."""

    first: Subject
    second: Subject

    @property
    def fields(self) -> list[tuple[str, Any, Any]]:
        """Return the fields that differ: key, value in A, value in B (None where one side has no such field)."""
        keys = dict.fromkeys([*self.first.values, *self.second.values])
        pairs = ((key, self.first.values.get(key), self.second.values.get(key)) for key in keys)
        return [(key, a, b) for key, a, b in pairs if a != b]

    @property
    def figures(self) -> list[tuple[str, float | None, float | None]]:
        """Return the quantities of both plans: name and unit, A, B."""
        a, b = _figures(self.first), _figures(self.second)
        return [(name, a[name], b[name]) for name in a if a[name] is not None or b[name] is not None]

    def document(self) -> dict[str, Any]:
        """Give the difference as a JSON document."""
        return {
            "schema_version": 1,
            "a": self.first.name,
            "b": self.second.name,
            "fields": [{"key": key, "a": a, "b": b} for key, a, b in self.fields],
            "figures": [{"name": name, "a": a, "b": b} for name, a, b in self.figures],
            "short": {"a": list(self.first.short), "b": list(self.second.short)},
        }


def compare(
    first: Side, second: Side, cluster: str, root: str | None, calibration: Callable[[ClusterProfile], Calibration]
) -> Difference:
    """Load both sides. A run is compared on the cluster that it ran on, a recipe on ``cluster``.

    Parameters
    ----------
    calibration:
        Calibration of predictions, by cluster: a profile may name its own kernel times.
    """
    return Difference(_subject(first, cluster, root, calibration), _subject(second, cluster, root, calibration))


def _subject(
    side: Side, cluster: str, root: str | None, calibration: Callable[[ClusterProfile], Calibration]
) -> Subject:
    from hpcrl.config.load import leaves
    from hpcrl.planning.report import find_facts, make_outlook
    from hpcrl.planning.verdict import judge

    name, recipe, site, step_s = _loaded(side, cluster, root)
    if side.overrides:
        name += " with --set"
        step_s = None  # the run was measured without these changes
    values = {f"recipe.{_key(path)}": value for path, value in leaves(recipe)}
    values |= {f"cluster.{_key(path)}": value for path, value in leaves(site)}
    facts = find_facts(recipe)
    outlook = make_outlook(recipe, site, calibration(site), facts)
    return Subject(name, values, outlook, step_s, judge(outlook, facts).short)


def _loaded(side: Side, cluster: str, root: str | None) -> tuple[str, Recipe, ClusterProfile, float | None]:
    """Return the name, recipe, cluster and measured seconds of a step of one side."""
    from statistics import median

    from hpcrl.cli.planning_inputs import prepare_forecast, say_refusals
    from hpcrl.cli.selection import runs_root
    from hpcrl.config.load import load_recipe
    from hpcrl.runs.known import known_runs
    from hpcrl.runs.metrics import read_metrics
    from hpcrl.runs.rundir import RunDir

    # a directory with a plan is a run, wherever it is; then names of runs, then recipes
    places = [Path(side.name), runs_root(root) / side.name, *(known.path for _, known in known_runs(side.name))]
    run = next((RunDir(path) for path in places if (path / "plan.json").is_file()), None)
    if run is None:
        prepared = prepare_forecast(side.name, cluster, list(side.overrides))
        say_refusals(prepared)
        return side.name, prepared.recipe.value, prepared.site.value, None
    steps = read_metrics(run)
    measured = median(sum(step.phases_s.values()) for step in steps) if steps else None
    recipe = load_recipe(str(run.recipe_path), side.overrides).value if side.overrides else run.recipe()
    return f"run {run.name}", recipe, run.cluster(), measured


def _key(path: tuple[str | int, ...]) -> str:
    return ".".join(str(part) for part in path)


def _figures(subject: Subject) -> dict[str, float | None]:
    outlook, loop = subject.outlook, subject.outlook.loop
    whole = outlook.forecast
    share = None if whole is None else sum(whole.share_bytes.values()) / 1e9
    return {
        "measured step (s)": subject.measured_step_s,
        "step (s)": None if loop is None else loop.step_s,
        "trainer (s)": None if loop is None else loop.trainer_s,
        "rollouts (s)": None if loop is None else loop.rollout_s,
        "staleness": None if loop is None else loop.staleness,
        "rollouts in flight": None if loop is None else loop.in_flight,
        "hand-off (s)": None if whole is None else whole.tables["handoff"].seconds,
        "nodes": None if whole is None else float(whole.layout.nodes),
        "GPU-hours a step": None if whole is None else whole.gpu_hours_per_step,
        "shared filesystem (GB a step)": share,
    }


def print_difference(console: Console, found: Difference) -> None:
    """Print what does not fit, and both tables."""
    from rich.table import Table

    for side in (found.first, found.second):
        for what in side.short:
            text = markup("[bold red]DOES NOT FIT[/] {}: {}", side.name, what)
            console.print(text, highlight=False, soft_wrap=True)

    if not found.fields:
        console.print(f"{found.first.name} and {found.second.name} are the same")
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("field", found.first.name, found.second.name):
        table.add_column(column, overflow="fold", no_wrap=column == "field")
    for key, a, b in found.fields:
        table.add_row(key, _text(a), _text(b))
    console.print(table)
    console.print()
    for side in (found.first, found.second):
        if side.outlook.because:
            console.print(f"no forecast of {side.name}: {side.outlook.because}", highlight=False, soft_wrap=True)
    if not found.figures:
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("forecast", found.first.name, found.second.name, "change"):
        table.add_column(column, justify="left" if column == "forecast" else "right")
    for name, before, after in found.figures:
        change = "" if before is None or after is None or not before else f"{after / before - 1:+.0%}"
        table.add_row(name, _number(before), _number(after), change)
    console.print(table)


def _text(value: Any) -> str:
    return "-" if value is None else str(value)


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:,.1f}"
