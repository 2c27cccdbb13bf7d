"""List of runs: one row each, fast for a thousand runs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice

import msgspec
from rich.console import Group
from rich.text import Text

from hpcrl.errors import HpcrlError
from hpcrl.runs.metrics import read_newest
from hpcrl.runs.newest_evaluation import read_newest_evaluation
from hpcrl.runs.observe import RunView, observe, observe_all
from hpcrl.runs.record import RunRecord
from hpcrl.runs.rollout_failures import WARN_SHARE, failures_of_counters, read_failures
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunState
from hpcrl.runs.views.failures import mean_words
from hpcrl.runs.views.swept_words import short_names, value_words
from hpcrl.runs.views.words import age, duration, state_text

LISTING_SCHEMA = "hpcrl.ls/1"
_WIDE = 120
"""Minimum width in columns for a cause in the row of its run; it is below the row otherwise."""
_CAUSE_INDENT = 4


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    """Run in the list.

    Attributes
    ----------
    cluster:
        Name of the profile that it was submitted with.
    job:
        Number of its newest Slurm job; None where it has none.
    steps, reward_mean, reward_count:
        Optimizer steps done; mean reward of the newest one, and its number of rollouts (0: unknown).
    failed_share:
        Training rollouts that failed, as a share of those that began, of the environment with the largest; None where
        none did.
    wall_s:
        Seconds of the newest attempt.
    cause:
        Cause of its end, if it was not successful.
    tags:
        Words by which the user finds it.
    sweep, swept:
        Name of its sweep (empty: none), and its values there by key, as JSON.
    heldout, heldout_count, heldout_version:
        Mean reward of its newest held-out evaluation, the number of rollouts, and the version; None: there was none.
    """

    name: str
    state: RunState
    recipe: str
    cluster: str
    job: str | None
    attempts: int
    created_at_s: float
    wall_s: float | None
    steps: int
    reward_mean: float | None
    cause: str
    reward_count: int = 0
    failed_share: float | None = None
    tags: list[str] = []
    sweep: str = ""
    swept: dict[str, str] = {}
    heldout: float | None = None
    heldout_count: int = 0
    heldout_version: int | None = None


def list_rows(
    runs: Sequence[RunDir],
    *,
    states: Collection[str] = (),
    cluster: str | None = None,
    newest: int = 0,
    tags: Collection[str] = (),
    left_out: Callable[[RunDir, str], None] | None = None,
) -> list[RunRow]:
    """Return a row of each run, in their order; unreadable runs are left out.

    Parameters
    ----------
    runs:
        Newest first.
    states:
        Only runs in one of these; all where it is empty.
    cluster:
        Only runs that were submitted with this profile.
    newest:
        Maximum number of rows; 0 for all.
    tags:
        Only runs that have all of these.
    left_out:
        Called with each unreadable run, and the reason in one line.
    """
    if newest and not states and cluster is None and not tags:
        runs = runs[:newest]
    rows = (row for _, row in rows_of_runs(runs, states=states, cluster=cluster, tags=tags, left_out=left_out))
    return list(islice(rows, newest) if newest else rows)


def rows_of_runs(
    runs: Iterable[RunDir],
    *,
    states: Collection[str] = (),
    cluster: str | None = None,
    tags: Collection[str] = (),
    left_out: Callable[[RunDir, str], None] | None = None,
) -> Iterator[tuple[RunDir, RunRow]]:
    """Yield what `list_rows` returns, with the directory of each run."""
    unread = {run.path: run for run in runs}
    for run, record, view in observe_all(list(unread.values())):
        del unread[run.path]
        if (states and view.state not in states) or cluster not in (None, view.cluster):
            continue
        if not set(tags) <= set(record.tags):
            continue
        try:
            row = _row(run, record, view)
        except (HpcrlError, OSError, ValueError) as error:
            if left_out is not None:
                left_out(run, _reason(error))
            continue
        yield run, row
    if left_out is not None:
        for run in unread.values():
            if why := unreadable_reason(run):
                left_out(run, why)


def unreadable_reason(run: RunDir) -> str:
    """Return in one line why the state of a run cannot be read; empty where it can, or the run is gone."""
    try:
        observe(run)
    except (HpcrlError, OSError, ValueError) as error:
        # one that was removed since it was found has no file any more
        return _reason(error) if os.path.lexists(run.record_path) else ""
    return ""


def _reason(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def _row(run: RunDir, record: RunRecord, view: RunView) -> RunRow:
    heldout, last = read_newest_evaluation(run), read_newest(run)
    rollouts = read_failures(run) or (failures_of_counters(last.rollouts) if last is not None else [])
    slurm = [submission.job_id for submission in record.submissions if submission.executor == "slurm"]
    return RunRow(
        name=view.name,
        state=view.state,
        recipe=view.recipe,
        cluster=view.cluster,
        job=slurm[-1] if slurm else None,
        attempts=view.attempts,
        created_at_s=view.created_at_s,
        wall_s=view.wall_s,
        steps=last.step if last is not None else 0,
        reward_mean=None if last is None else last.reward_mean,
        cause=f"a copy of {view.copy_of}" if view.copy_of else "" if view.cause is None else view.cause.message,
        reward_count=0 if last is None else last.reward_count,
        failed_share=max((each.share for each in rollouts if each.total), default=None),
        tags=record.tags,
        sweep="" if record.sweep is None else record.sweep.sweep,
        swept={} if record.sweep is None else record.sweep.values,
        heldout=None if heldout is None else heldout.reward,
        heldout_count=0 if heldout is None else heldout.count,
        heldout_version=None if heldout is None else heldout.version,
    )


def listing_document(rows: list[RunRow]) -> str:
    """Return the list as JSON (schema `LISTING_SCHEMA`)."""
    return msgspec.json.format(msgspec.json.encode({"schema": LISTING_SCHEMA, "runs": rows}), indent=2).decode()


def listing_table(rows: list[RunRow], width: int, *, cut: bool = True) -> Group:
    """Return the list for a person, within ``width`` columns.

    Names are never cut, because they are arguments of other commands. Lines are made here and not by a table of rich,
    which takes longer for a thousand of them than reading the runs.

    Parameters
    ----------
    cut:
        Whether a cause is cut at the end of the line.
    """
    wide = width >= _WIDE
    columns = ["run", "state", "age", "time", "steps", "reward"]
    if any(row.heldout is not None for row in rows):
        columns.append("held-out")
    if any((row.failed_share or 0.0) >= WARN_SHARE for row in rows):
        columns.append("failed")
    if any(row.job is not None for row in rows):
        columns.insert(2, "job")
    if wide:
        columns[2:2] = ["cluster"]
        columns += [
            "attempts",
            *(name for name in ("swept", "tags") if any(_words(row)[name] for row in rows)),
            "cause",
        ]
    cells = [_cells(row, columns) for row in rows]
    # columns that do not fit with the longest name are removed, the least needed first
    for column in () if wide else ("reward", "time", "age", "held-out"):
        if column in columns and _needed(columns, cells) > width:
            at = columns.index(column)
            columns.pop(at)
            for line in cells:
                line.pop(at)
    widths = _widths(columns, cells)
    lines = [_line(columns, columns, widths)]
    lines[0].stylize("dim")
    state = columns.index("state")
    at = sum(widths[:state]) + len(_GAP) * state
    for row, line in zip(rows, cells, strict=True):
        lines.append(_line(line, columns, widths))
        lines[-1].stylize(state_text(row.state).style, at, at + len(row.state))
        if wide and cut:
            lines[-1].truncate(width, overflow="ellipsis")
        elif row.cause and not wide:
            cause = Text(" " * _CAUSE_INDENT + row.cause, style="dim", no_wrap=True, overflow="ellipsis")
            if cut:
                cause.truncate(width, overflow="ellipsis")
            lines.append(cause)
    return Group(*lines)


_GAP = "  "
_NUMBERS = ("job", "age", "time", "steps", "reward", "held-out", "failed", "attempts")


def _words(row: RunRow) -> dict[str, str]:
    """Return the swept values and the tags of a run, without the tag that only repeats its sweep."""
    names = short_names(list(row.swept))
    return {
        "swept": " ".join(f"{names[key]}={value_words(value)}" for key, value in row.swept.items()),
        "tags": " ".join(tag for tag in row.tags if tag != row.sweep),
    }


def row_words(row: RunRow, *, now_s: float) -> dict[str, str]:
    """Return the words of each column of the list."""
    return {
        "run": row.name,
        "state": row.state.value,
        "cluster": row.cluster,
        "job": row.job or "-",
        "age": age(now_s - row.created_at_s),
        "time": duration(row.wall_s),
        "steps": str(row.steps),
        "reward": "-" if row.reward_mean is None else mean_words(row.reward_mean, row.reward_count),
        "failed": "" if row.failed_share is None else f"{row.failed_share:.0%}",
        "attempts": str(row.attempts),
        "held-out": "-" if row.heldout is None else mean_words(row.heldout, row.heldout_count),
        "cause": row.cause,
        **_words(row),
    }


def _cells(row: RunRow, columns: list[str]) -> list[str]:
    values = row_words(row, now_s=time.time())
    return [values[column] for column in columns]


def _widths(columns: list[str], cells: list[list[str]]) -> list[int]:
    return [max(len(column), *(len(line[i]) for line in cells)) for i, column in enumerate(columns)]


def _needed(columns: list[str], cells: list[list[str]]) -> int:
    return sum(_widths(columns, cells)) + len(_GAP) * (len(columns) - 1)


def _line(values: list[str], columns: list[str], widths: list[int]) -> Text:
    fields = zip(values, columns, widths, strict=True)
    padded = (value.rjust(size) if column in _NUMBERS else value.ljust(size) for value, column, size in fields)
    return Text(_GAP.join(padded).rstrip(), no_wrap=True, overflow="ignore")
