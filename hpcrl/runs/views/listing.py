"""The list of runs: one row each, cheap enough for a thousand."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

import msgspec
from rich.console import Group
from rich.text import Text

from hpcrl.runs.metrics import read_newest
from hpcrl.runs.observe import observe_all
from hpcrl.runs.rollout_failures import WARN_SHARE, failures_of_counters, read_failures
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunState
from hpcrl.runs.views.failures import mean_words
from hpcrl.runs.views.words import age, duration, state_text

__all__ = ["LISTING_SCHEMA", "RunRow", "list_rows", "listing_document", "listing_table"]

LISTING_SCHEMA = "hpcrl.ls/1"
_WIDE = 120
"""From this width a cause stands in the row of its run, below it otherwise."""
_CAUSE_INDENT = 4


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    """One run in the list.

    Attributes
    ----------
    cluster:
        Name of the profile that it was submitted with.
    job:
        Number of its newest Slurm job; None where it has none.
    steps, reward_mean, reward_count:
        Optimizer steps done; mean reward of the newest one, and of how many rollouts (0: not known).
    failed_share:
        Training rollouts that failed, as a share of those that began, of the environment with the largest; None where
        none did.
    wall_s:
        Seconds of the newest attempt.
    cause:
        Why it ended, if not by success.
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


def list_rows(
    runs: Sequence[RunDir], *, states: Collection[str] = (), cluster: str | None = None, newest: int = 0
) -> list[RunRow]:
    """A row of each run, in their order. What cannot be read is left out.

    Parameters
    ----------
    runs:
        Newest first.
    states:
        Only runs in one of these; all where it is empty.
    cluster:
        Only runs that were submitted with this profile.
    newest:
        At most so many; 0 for all.
    """
    rows: list[RunRow] = []
    if newest and not states and cluster is None:
        runs = runs[:newest]
    for run, record, view in observe_all(runs):
        if (states and view.state not in states) or cluster not in (None, view.cluster):
            continue
        last = read_newest(run)
        rollouts = read_failures(run) or (failures_of_counters(last.rollouts) if last is not None else [])
        slurm = [submission.job_id for submission in record.submissions if submission.executor == "slurm"]
        rows.append(
            RunRow(
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
            )
        )
        if newest and len(rows) == newest:
            break
    return rows


def listing_document(rows: list[RunRow]) -> str:
    """The list as JSON (schema `LISTING_SCHEMA`)."""
    return msgspec.json.format(msgspec.json.encode({"schema": LISTING_SCHEMA, "runs": rows}), indent=2).decode()


def listing_table(rows: list[RunRow], width: int, *, cut: bool = True) -> Group:
    """The list for a person, within ``width`` columns. Names are never cut: they are what other commands are given.

    Lines are made here and not by a table of rich, which takes longer for a thousand of them than reading the runs.

    Parameters
    ----------
    cut:
        Whether a cause ends where the line does; all of it is said otherwise.
    """
    wide = width >= _WIDE
    columns = ["run", "state", "age", "time", "steps", "reward"]
    if any((row.failed_share or 0.0) >= WARN_SHARE for row in rows):
        columns.append("failed")
    if any(row.job is not None for row in rows):
        columns.insert(2, "job")
    if wide:
        columns[2:2] = ["cluster"]
        columns += ["attempts", "cause"]
    cells = [_cells(row, columns) for row in rows]
    # what is too much beside the longest name goes, the least needed first
    for column in () if wide else ("reward", "time", "age"):
        if _needed(columns, cells) > width:
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
_NUMBERS = ("job", "age", "time", "steps", "reward", "failed", "attempts")


def _cells(row: RunRow, columns: list[str]) -> list[str]:
    values = {
        "run": row.name,
        "state": row.state.value,
        "cluster": row.cluster,
        "job": row.job or "-",
        "age": age(time.time() - row.created_at_s),
        "time": duration(row.wall_s),
        "steps": str(row.steps),
        "reward": "-" if row.reward_mean is None else mean_words(row.reward_mean, row.reward_count),
        "failed": "" if row.failed_share is None else f"{row.failed_share:.0%}",
        "attempts": str(row.attempts),
        "cause": row.cause,
    }
    return [values[column] for column in columns]


def _widths(columns: list[str], cells: list[list[str]]) -> list[int]:
    return [max(len(column), *(len(line[i]) for line in cells)) for i, column in enumerate(columns)]


def _needed(columns: list[str], cells: list[list[str]]) -> int:
    return sum(_widths(columns, cells)) + len(_GAP) * (len(columns) - 1)


def _line(values: list[str], columns: list[str], widths: list[int]) -> Text:
    fields = zip(values, columns, widths, strict=True)
    padded = (value.rjust(size) if column in _NUMBERS else value.ljust(size) for value, column, size in fields)
    return Text(_GAP.join(padded).rstrip(), no_wrap=True, overflow="ignore")
