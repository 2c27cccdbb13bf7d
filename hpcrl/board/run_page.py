"""Pages of one run and of several runs over each other: the sections of ``hpcrl report``, live."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from hpcrl.analysis.comparison.compared import compare_runs
from hpcrl.analysis.comparison.comparison_table import comparison_lines
from hpcrl.analysis.page.page_values import page_values
from hpcrl.board.board_state import MOST_COMPARED, Board, BoardAnswer, clock, view_stamp
from hpcrl.board.file_stamps import record_stamp
from hpcrl.errors import UsageError
from hpcrl.runs.fleet import read_fleet
from hpcrl.runs.observe import RunView, observe
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.views.diagnosis import diagnose
from hpcrl.runs.views.words import duration


def run_page(board: Board, key: str, run: RunDir, seen: str) -> BoardAnswer:
    """Return the page of one run (errors: `hpcrl.board.board_state.Board.materials`)."""
    view = observe(run)
    tag = board.tag(*_tag_parts(run, view))
    if tag == seen:
        return BoardAnswer(None, tag)
    head: dict[str, Any] = {"key": key, "run": run_head(view), "place": "run"}
    why = board.reasons.get(run.path, tag, lambda: _reasons(run, view))
    plotted = board.plotted([run])
    if not plotted.materials[0].history.records:
        return board.render("waiting.html.j2", tag, of=[run], **head, why=why, title=f"{view.name} · run")
    tables = page_values(plotted, None, board.scan([run]))
    return board.render("run.html.j2", tag, of=[run], cleaned=tables, **head, why=why, title=f"{view.name} · run")


def compare_page(board: Board, keys: Sequence[str], seen: str) -> BoardAnswer:
    """Return runs over each other, with their differences.

    Raises
    ------
    UsageError
        There are fewer than two, too many, or one has no step yet.
    """
    chosen = list(dict.fromkeys(keys))
    if not 2 <= len(chosen) <= MOST_COMPARED:
        raise UsageError(f"a comparison needs two to {MOST_COMPARED} runs\n    hint: choose them in the list")
    runs = [board.keys.find(key) for key in chosen]
    parts = [part for run in runs for part in _tag_parts(run, observe(run))]
    tag = board.tag("compare", *chosen, *parts)
    if tag == seen:
        return BoardAnswer(None, tag)
    plotted = board.plotted(runs)
    for each in plotted.materials:
        if not each.history.records:
            raise UsageError(f"{each.history.name} has no step yet, so there is nothing to compare")
    stamp = board.tag(*(record_stamp(run) for run in runs))
    lines = board.comparisons.get(tuple(chosen), stamp, lambda: list(comparison_lines(compare_runs(runs))))
    tables, title = page_values(plotted, None, board.scan(runs)), f"{len(runs)} runs · compare"
    names = [{"key": key, "name": each.history.name} for key, each in zip(chosen, plotted.materials, strict=True)]
    return board.render("compare.html.j2", tag, of=runs, cleaned=tables, lines=lines, chosen=names, title=title)


def run_head(view: RunView) -> dict[str, Any]:
    """Return what every page of a run shows at its top."""
    return {
        "name": view.name,
        "state": view.state.value,
        "attempt": view.attempt,
        "recipe": view.recipe,
        "cluster": view.cluster,
        "created": clock(view.created_at_s),
        "time": duration(view.wall_s) if view.state.ended else "",
        "directory": view.run_dir,
        "ended": view.state.ended,
    }


def _tag_parts(run: RunDir, view: RunView) -> list[object]:
    """Return what the page depends on: what the supervisor reports every few seconds is not a part of it."""
    replicas = [
        [each.role, each.replica, each.state.value] for each in read_fleet(run, view.attempt, view.components)[1]
    ]
    plain = msgspec.structs.replace(view, components=[])
    return [record_stamp(run), view_stamp(plain), replicas]


def _reasons(run: RunDir, view: RunView) -> dict[str, Any]:
    """Return what ended a run and how to continue it, as ``hpcrl why`` has it; empty while it lives."""
    if view.cause is None:
        return {}
    found = diagnose(run)
    return {"sentence": found.sentence, "hint": found.hint, "ways": found.ways_on, "words": found.last_words[-8:]}
