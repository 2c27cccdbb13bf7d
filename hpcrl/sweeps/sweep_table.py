"""A sweep as a table for a person."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from rich.console import Group
from rich.table import Table
from rich.text import Text

from hpcrl.runs.views.failures import mean_words
from hpcrl.runs.views.swept_words import short_names, value_words
from hpcrl.runs.views.words import duration, number, state_text
from hpcrl.sweeps.results import MemberRow, SettingRow, SweepResult

_NUMBERS = ("step", "reward", "held-out", "95 %", "time")
"""Columns of numbers."""
_MAX_PROBLEM = 200
"""Maximum characters of a problem in its row; all of it is in JSON, and in ``hpcrl why``."""


def sweep_views(result: SweepResult) -> Iterator[tuple[Table, Group]]:
    """Yield members with their swept values and held-out rewards, and the best setting below them.

    Each is narrower than the one before it: the table alone, to be measured, and all of the view.
    """
    names = short_names(result.keys)
    lines = [Text(line) for line in result_lines(result, names)]
    for left_out in ((), ("time",), ("time", "reward"), ("time", "reward", "95 %")):
        table = _table(result, names, left_out)
        yield table, Group(Text(_head(result)), table, *lines)


def _table(result: SweepResult, names: Mapping[str, str], left_out: Collection[str]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("run", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for key in result.keys:
        table.add_column(names[key], justify="right", no_wrap=True)
    columns = [column for column in _NUMBERS if column not in left_out]
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    with_problems = any(row.problem for row in result.members)
    if with_problems:
        table.add_column("", overflow="ellipsis", no_wrap=True)
    for row in result.members:
        numbers = _numbers(row)
        cells: list[Text | str] = [row.run, state_text(row.state)]
        cells += [value_words(row.values[key]) if key in row.values else "-" for key in result.keys]
        cells += [numbers[column] for column in columns]
        table.add_row(*cells, *([Text(row.problem[:_MAX_PROBLEM], style="dim")] if with_problems else []))
    return table


def result_lines(result: SweepResult, names: Mapping[str, str]) -> list[str]:
    """Return what the sweep has shown, and what a person has to do."""
    lines = []
    if result.best is not None:
        word = "best" if result.ended else "best so far"
        lines.append(f"{word}: {_setting_words(result.best, names)}")
        if result.difference is not None:
            value, low, high = result.difference
            verdict = "more than noise" if low > 0 else "not more than noise"
            second = _values_words(result.settings[1].values, names)
            lines.append(f"second: {second}: {number(value)} less [{number(low)}, {number(high)}], which is {verdict}")
    if result.waits_for:
        lines.append(f"the queue waits for {result.waits_for}")
    if result.cancelled_by:
        lines.append(f"cancelled by {result.cancelled_by}; hpcrl sweep resume {result.name} continues it")
    if result.idle:
        lines.append(f"members wait, and no process starts them: hpcrl sweep resume {result.name}")
    return lines


def _head(result: SweepResult) -> str:
    counts = ", ".join(f"{count} {state}" for state, count in sorted(result.counts.items()))
    limit = "" if result.max_running is None else f", at most {result.max_running} at a time"
    queue = f", queue {result.queue}" if result.queue else ""
    return f"{result.name}: {result.recipe} on {result.cluster}: {counts}{limit}{queue}"


def _numbers(row: MemberRow) -> dict[str, str]:
    """Return the cells of `_NUMBERS`."""
    return {
        "step": str(row.step),
        "reward": number(row.reward),
        "held-out": "-" if row.heldout is None else mean_words(row.heldout, row.count),
        "95 %": "-" if row.low is None else f"[{number(row.low)}, {number(row.high)}]",
        "time": duration(row.wall_s),
    }


def _setting_words(row: SettingRow, names: Mapping[str, str]) -> str:
    interval = "" if row.low is None else f" [{number(row.low)}, {number(row.high)}]"
    of = f"{row.count} seeds" if row.noise == "seeds" else f"{row.count} held-out rollouts of one run"
    return f"{_values_words(row.values, names)}: held-out {number(row.heldout)}{interval}, {of}; {', '.join(row.runs)}"


def _values_words(values: Mapping[str, str], names: Mapping[str, str]) -> str:
    return " ".join(f"{names[key]}={value_words(value)}" for key, value in values.items()) or "the only setting"
