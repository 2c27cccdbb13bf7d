"""The list of runs of a board, with filters and a search."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from hpcrl.board.board_state import Board, BoardAnswer, clock
from hpcrl.board.reading_pools import SilentPlaceError
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunState
from hpcrl.runs.views.listing import RunRow, row_words, rows_of_runs

_Read = tuple[list[tuple[RunDir, RunRow]], list[tuple[RunDir, str]]]
"""Rows of runs, and runs that have none, with the reasons."""
MOST_ROWS = 500
"""Maximum number of runs of the page."""
_COLUMNS = ("state", "cluster", "job", "age", "time", "steps", "reward", "held-out", "failed", "attempts")
_OPTIONAL = ("job", "held-out", "failed", "swept", "tags")
"""Columns that are left out where no run has a value."""


def list_page(board: Board, query: Mapping[str, str], seen: str) -> BoardAnswer:
    """Return the list: newest first, filtered by state, cluster, tag and words."""
    keys = {str(run.path): (key, run) for key, run in board.keys.all().items()}
    wanted = {name: query.get(name, "").strip()[:200] for name in ("q", "state", "cluster", "tag")}
    filtered = any(wanted.values())
    chosen = [run for _, run in keys.values()]
    odd: list[dict[str, str]] = []

    def left_out(run: RunDir, why: str) -> None:
        odd.append({"key": keys[str(run.path)][0], "problem": why})

    found, silent = _read_rows(board, chosen if filtered else chosen[:MOST_ROWS], left_out)
    silent = sorted({*silent, *board.keys.silent})
    shown = [(run, row) for run, row in found if _matches(row, wanted)][:MOST_ROWS]
    rows = [_row(keys[str(run.path)][0], row) for run, row in shown]
    columns = [
        name
        for name in (*_COLUMNS, "swept", "tags")
        if name not in _OPTIONAL or any(row["words"][name] not in ("", "-") for row in rows)
    ]
    values: dict[str, Any] = {
        "rows": rows,
        "columns": columns,
        "wanted": wanted,
        "filtered": filtered,
        "total": len(keys),
        "odd": odd if not filtered else [],
        "silent": silent,
        "roots": board.roots,
        "states": [state.value for state in RunState],
        "clusters": sorted({row.cluster for _, row in found}),
        "tags": sorted({tag for _, row in found for tag in row.tags}),
        "title": "Runs",
        "most": MOST_ROWS,
    }
    tag = board.tag([row["tag"] for row in rows], columns, wanted, odd, silent, len(keys), values["tags"])
    return BoardAnswer(None, tag) if tag == seen else board.render("list.html.j2", tag, **values)


def _read_rows(
    board: Board, runs: Sequence[RunDir], left_out: Callable[[RunDir, str], None]
) -> tuple[list[tuple[RunDir, RunRow]], list[str]]:
    """Return the rows of runs in their order, and the directories that do not answer."""
    places: dict[str, list[RunDir]] = {}
    for run in runs:
        places.setdefault(str(run.path.parent), []).append(run)
    asked, rows, silent = dict[str, Future[_Read]](), dict[Path, RunRow](), list[str]()
    for place, own in places.items():
        try:
            asked[place] = board.pools.submit(f"rows {place}", partial(_rows, own))
        except SilentPlaceError:
            silent.append(place)
    for place, future in asked.items():
        try:
            found, problems = board.pools.wait(future)
        except SilentPlaceError:
            silent.append(place)
            continue
        rows |= {run.path: row for run, row in found}
        for run, why in problems:
            left_out(run, why)
    return [(run, rows[run.path]) for run in runs if run.path in rows], silent


def _rows(runs: Sequence[RunDir]) -> _Read:
    problems = list[tuple[RunDir, str]]()
    return list(rows_of_runs(runs, left_out=lambda run, why: problems.append((run, why)))), problems


def _matches(row: RunRow, wanted: Mapping[str, str]) -> bool:
    if wanted["state"] not in ("", row.state.value) or wanted["cluster"] not in ("", row.cluster):
        return False
    if wanted["tag"] and wanted["tag"] not in row.tags:
        return False
    text = " ".join([row.name, row.recipe, row.cluster, row.job or "", row.cause, row.sweep, *row.tags]).lower()
    return all(word in text for word in wanted["q"].lower().split())


def _row(key: str, row: RunRow) -> dict[str, Any]:
    created, now_s = f"{clock(row.created_at_s)} UTC", time.time()
    words = row_words(row, now_s=now_s)
    # seconds differ at each look: without another change the page is sent again after a minute
    minutes = {"age": (now_s - row.created_at_s) // 60, "time": (row.wall_s or 0) // 60}
    tag = [key, {**words, **minutes}]
    return {"key": key, "name": row.name, "state": row.state.value, "created": created, "words": words, "tag": tag}
