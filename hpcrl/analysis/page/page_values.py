"""Values of a page of runs: what its template shows, and what its program draws, from files of the runs."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup

from hpcrl import __version__
from hpcrl.analysis.learning_difference import CAUTION, held_out_differences, training_difference
from hpcrl.analysis.page.definitions import anchor_of, definition_name, definition_rows
from hpcrl.analysis.page.idle_seconds import role_seconds
from hpcrl.analysis.page.learning_plots import LEARNING, POLICY, learning_plots
from hpcrl.analysis.page.marks import Mark
from hpcrl.analysis.page.material import Plot, RunMaterial
from hpcrl.analysis.page.planned_times import planned_times
from hpcrl.analysis.page.recipe_rows import code_differences, code_values, recipe_differences, recipe_rows
from hpcrl.analysis.page.role_hours import checkpoint_rows, engine_rows, goodput_rows, request_rows, version_rows
from hpcrl.analysis.page.time_spans import timelines
from hpcrl.analysis.page.work_plots import FLEET, ROLLOUTS, TIME, work_plots
from hpcrl.analysis.series import MOST_POINTS
from hpcrl.runs.lenient import finite
from hpcrl.runs.sharing.secret_scan import SecretScan
from hpcrl.runs.views.words import duration, number

ASSETS = Path(__file__).parent / "assets"
"""Templates, styles and programs of pages."""
_MOST_MARKS = 200
"""Maximum number of marks of a run on plots; the table has all of them, up to `_MOST_ROWS`."""
_MOST_ROWS = 500
_ALL_POINTS, _LEAST_POINTS = 40_000, 20
"""Points of all lines of a page, and the least that a line has."""
_ANCHORS = {LEARNING: "learning", POLICY: "policy", ROLLOUTS: "rollouts", TIME: "time", FLEET: "fleet"}


class PlottedRuns(NamedTuple):
    """Runs with their plots over steps, which need no other files of the runs.

    Attributes
    ----------
    documents:
        The plots as plain values, with a bounded number of points.
    """

    materials: list[RunMaterial]
    plots: list[Plot]
    documents: list[dict[str, Any]]


def plot_runs(materials: Sequence[RunMaterial]) -> PlottedRuns:
    """Return the plots of runs over steps."""
    plots = [*learning_plots(materials), *work_plots(materials)]
    # lines of many environments or runs share the points of a page
    most = max(_LEAST_POINTS, min(MOST_POINTS, _ALL_POINTS // max(1, sum(len(plot.lines) for plot in plots))))
    return PlottedRuns(list(materials), plots, [plot.document(most) for plot in plots])


def page_values(
    plotted: PlottedRuns, rollouts: Sequence[list[dict[str, Any]]] | None, scan: SecretScan
) -> dict[str, Any]:
    """Return the values of ``sections.html.j2``.

    Parameters
    ----------
    rollouts:
        Rollouts to read, of each run; None: a page without them.
    scan:
        Finds secrets in texts of these runs, which are replaced: people hand pages on.
    """
    materials = plotted.materials
    lanes = timelines(materials[0].history, materials[0].marks) if len(materials) == 1 else []
    shown = rollouts or [[] for _ in materials]
    values: dict[str, Any] = {
        "title": "hpcrl: " + ", ".join(each.history.name for each in materials),
        "version": __version__,
        "names": [each.history.name for each in materials],
        "data": Markup(script_json(scan.cleaned(_data(plotted, lanes, shown)))),
        "overview": _overview(materials),
        "warnings": [warning for each in materials for warning in each.history.view.warnings],
        "comparison": _comparison(materials) if len(materials) > 1 else None,
        "plot_sections": _sections(plotted.plots),
        "timelines": [{**each, "unit": "", "definitions": [], "notes": []} for each in lanes],
        "runs": [_run_tables(each) for each in materials],
        "marks": [_mark_row(each, mark) for each in materials for mark in each.marks[-_MOST_ROWS:]],
        "with_rollouts": rollouts is not None,
        "with_mismatch": any(each["mismatch"] for own in shown for each in own),
        "rollouts": [_rollout_row(run, index, each) for run, own in enumerate(shown) for index, each in enumerate(own)],
        "no_rollouts": [f"{e.history.name}: {e.finished.why_not}" for e in materials if e.finished.why_not],
        "definitions": definition_rows(),
    }
    values["sections"] = _navigation(values)
    cleaned: dict[str, Any] = scan.cleaned(values)
    return cleaned


def page_templates(*more: Path) -> jinja2.Environment:
    """Return the templates of pages, and those in further directories; all texts are escaped."""
    loader = jinja2.FileSystemLoader([ASSETS, *more])
    return jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)


def script_json(value: Any) -> str:
    """Return JSON that cannot end the element that it stands in."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:  # a number that JSON does not have
        text = json.dumps(finite(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # a lone surrogate has no encoding
    return text.replace("<", "\\u003c").encode("utf-8", "backslashreplace").decode()


def _data(
    plotted: PlottedRuns, lanes: Sequence[dict[str, Any]], rollouts: Sequence[list[dict[str, Any]]]
) -> dict[str, Any]:
    materials = plotted.materials
    return {
        "runs": [
            {
                "name": each.history.name,
                "marks": [_mark_on_plots(mark) for mark in _most_important(each.marks)],
                "rollouts": [{name: rollout[name] for name in ("turns", "turns_left_out", "text")} for rollout in own],
            }
            for each, own in zip(materials, rollouts, strict=True)
        ],
        "plots": list(plotted.documents),
        "timelines": list(lanes),
    }


def _most_important(marks: Sequence[Mark]) -> list[Mark]:
    """Return the marks of plots: where there are too many, restarts and ends, and the newest faults."""
    if len(marks) <= _MOST_MARKS:
        return list(marks)
    others = [mark for mark in marks if mark.kind != "fault"][-_MOST_MARKS:]
    faults = [mark for mark in marks if mark.kind == "fault"]
    left = _MOST_MARKS - len(others)
    return sorted([*others, *(faults[-left:] if left else [])], key=lambda mark: mark.time_s)


def _mark_on_plots(mark: Mark) -> dict[str, Any]:
    return {"step": round(mark.step, 3), "kind": mark.kind, "what": mark.what}


def _mark_row(material: RunMaterial, mark: Mark) -> dict[str, Any]:
    return {
        "run": material.history.name,
        "time": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(mark.time_s)),
        "step": f"{mark.step:.1f}",
        "attempt": mark.attempt,
        "kind": mark.kind,
        "what": mark.what,
    }


def _overview(materials: Sequence[RunMaterial]) -> dict[str, Any]:
    head = ["run", "state", "steps", "reward", "held-out", "attempts", "time of steps", "recipe", "cluster", "created"]
    rows = []
    for each in materials:
        view, records = each.history.view, each.history.records
        evaluations = each.history.evaluations
        held_out = f"{number(evaluations[-1].reward)} after step {evaluations[-1].version}" if evaluations else "-"
        rows.append(
            [
                view.name,
                view.state.value,
                f"{records[-1].step:,} of {each.recipe.trainer.steps:,}",
                number(records[-1].reward_mean),
                held_out,
                view.attempts,
                duration(sum(sum(record.phases_s.values()) for record in records)),
                view.recipe,
                view.cluster,
                time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(view.created_at_s)),
            ]
        )
    return {"head": head, "rows": rows}


def _sections(plots: Sequence[Plot]) -> list[tuple[str, list[dict[str, Any]]]]:
    found = []
    for section, anchor in _ANCHORS.items():
        own = [
            {
                "id": plot.id,
                "title": plot.title,
                "unit": plot.unit,
                "notes": plot.notes,
                "definitions": [(anchor_of(name), definition_name(name)) for name in plot.curves],
            }
            for plot in plots
            if plot.section == section
        ]
        found.append((anchor, own))
    return found


def _comparison(materials: Sequence[RunMaterial]) -> dict[str, Any]:
    """Return the differences of several runs; what they have learned is compared with the first one."""
    learning = []
    first = materials[0]
    found = [
        (f"{other.history.name} minus {first.history.name}", training_difference(first.finished, other.finished))
        for other in materials[1:]
    ]
    for names, each in (*found, *held_out_differences([material.history for material in materials])):
        interval = "unknown" if each.low is None else f"{number(each.low)} to {number(each.high)}"
        answer = {None: "unknown", True: "yes", False: "no"}[each.more_than_noise]
        learning.append((names, each.what, number(each.difference, "+.3f"), interval, answer, each.method))
    return {
        "recipe": [[row["key"], *row["values"]] for row in recipe_differences(materials)],
        "code": [[row["key"], *row["values"]] for row in code_differences(materials)],
        "learning": learning,
        "caution": CAUTION,
    }


def _navigation(values: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the sections of the page: anchors and names."""
    differences = [("differences", "Differences")] if values["comparison"] else []
    plots = [(anchor, section) for section, anchor in _ANCHORS.items()]
    rollouts = [("rollouts-read", "Rollouts to read")] if values["with_rollouts"] else []
    others = [("faults", "Faults and restarts"), *rollouts, ("recipe", "Recipe and code")]
    return [("overview", "Overview"), *differences, *plots, *others, ("definitions", "Definitions")]


def _run_tables(material: RunMaterial) -> dict[str, Any]:
    rows = [list(row.values()) for row in recipe_rows(material)]
    return {
        "name": material.history.name,
        "goodput": goodput_rows(material),
        "seconds": [
            (each.role, each.kind, each.cause, f"{each.seconds:,.1f}", f"{each.share:.1%}")
            for each in role_seconds(material.history, material.recipe)
        ],
        "planned": planned_times(material),
        "engines": [list(row.values()) for row in engine_rows(material)],
        "requests": request_rows(material),
        "versions": version_rows(material),
        "checkpoints": [list(row.values()) for row in checkpoint_rows(material)],
        "recipe": [row for row in rows if row[2] != "default"],
        "defaults": [row for row in rows if row[2] == "default"],
        "code": list(code_values(material).items()),
    }


def _rollout_row(run: int, index: int, rollout: dict[str, Any]) -> dict[str, Any]:
    facts = rollout["facts"]
    words = [rollout["rank"], str(facts.get("environment", "")), f"reward {number(facts.get('reward'))}"]
    words += [f"step {facts.get('step', '-')}", f"{facts.get('sampled_tokens', 0):,} tokens sampled"]
    return {
        "run": run,
        "index": index,
        "id": facts.get("id", ""),
        "rank": rollout["rank"],
        "summary": " · ".join(words),
        "facts": [(name, json.dumps(value, ensure_ascii=False)) for name, value in facts.items()],
    }
