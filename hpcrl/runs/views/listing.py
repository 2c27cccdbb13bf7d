"""The list of runs: one row each, cheap enough for hundreds."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
from rich.table import Table

from hpcrl.errors import RunDirError
from hpcrl.runs.metrics import read_metrics
from hpcrl.runs.observe import observe, prefetch
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunState
from hpcrl.runs.views.liveview import duration, state_text

__all__ = ["LISTING_SCHEMA", "RunRow", "list_rows", "listing_document", "listing_table"]

LISTING_SCHEMA = "hpcrl.ls/1"


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    """One run in the list.

    Attributes
    ----------
    steps, reward_mean:
        Optimizer steps done; mean reward of the newest one.
    wall_s:
        Seconds of the newest attempt.
    cause:
        Why it ended, if not by success.
    """

    name: str
    state: RunState
    recipe: str
    attempts: int
    created_at_s: float
    wall_s: float | None
    steps: int
    reward_mean: float | None
    cause: str


def list_rows(runs: Sequence[RunDir]) -> list[RunRow]:
    """A row of each run, in their order. What cannot be read is left out."""
    rows = []
    prefetch(runs)
    for run in runs:
        try:
            view = observe(run)
        except RunDirError:
            continue
        metrics = read_metrics(run)
        rows.append(
            RunRow(
                name=view.name,
                state=view.state,
                recipe=view.recipe,
                attempts=view.attempts,
                created_at_s=view.created_at_s,
                wall_s=view.wall_s,
                steps=metrics[-1].step if metrics else 0,
                reward_mean=metrics[-1].reward_mean if metrics else None,
                cause="" if view.cause is None else view.cause.message,
            )
        )
    return rows


def listing_document(rows: list[RunRow]) -> str:
    """The list as JSON (schema `LISTING_SCHEMA`)."""
    return msgspec.json.format(msgspec.json.encode({"schema": LISTING_SCHEMA, "runs": rows}), indent=2).decode()


def listing_table(rows: list[RunRow]) -> Table:
    """The list for a person."""
    table = Table(box=None, header_style="dim", pad_edge=False)
    for column in ("run", "state", "created", "attempts", "time", "steps", "reward", "cause"):
        table.add_column(column, justify="right" if column in ("attempts", "time", "steps", "reward") else "left")
    for row in rows:
        table.add_row(
            row.name,
            state_text(row.state),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(row.created_at_s)),
            str(row.attempts),
            duration(row.wall_s),
            str(row.steps),
            "-" if row.reward_mean is None else f"{row.reward_mean:.3f}",
            row.cause,
        )
    return table
