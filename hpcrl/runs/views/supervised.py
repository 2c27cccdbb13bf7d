"""Views of supervised runs, which have losses in place of rewards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from hpcrl.runs.metrics import StepRecord
from hpcrl.runs.views.words import number

_ROWS = 2


def is_supervised(record: StepRecord) -> bool:
    """Return whether a step trained on conversations: it has neither rewards nor versions of rollouts."""
    return math.isnan(record.reward_mean) and not record.reward_count and not record.staleness_histogram


def step_words(record: StepRecord) -> str:
    """Return the losses of a step in words."""
    held_out = "" if record.held_out_loss is None else f"  held-out {number(record.held_out_loss, '.4f')}"
    return f"loss {number(record.loss, '.4f')}{held_out}"


def loss_text(records: Sequence[StepRecord]) -> Text:
    """Return the newest losses of a run in words; ``records`` are its steps, the oldest first."""
    text = Text.assemble("loss ", (number(records[-1].loss, ".4f"), "bold"))
    if (newest := _newest_held_out(records)) is not None:
        text.append("   held-out ")
        text.append(number(newest.held_out_loss, ".4f"), style="bold")
        text.append(f" after step {newest.step}")
    return text


def loss_rows(records: Sequence[StepRecord]) -> list[tuple[str, str]]:
    """Return the first and the last losses of a run, a name and words each."""
    rows = [("loss", _from_to([(record.step, record.loss) for record in records]))]
    held_out = [(record.step, record.held_out_loss) for record in records if record.held_out_loss is not None]
    return [*rows, ("held-out loss", _from_to(held_out))] if held_out else rows


def losses_table(records: Sequence[StepRecord]) -> Table:
    """Make the table of the newest steps."""
    table = Table(box=None, header_style="dim", pad_edge=False)
    for column in ("step", "loss", "held-out", "entropy", "gradient", "rate", "tokens", "trained", "seconds"):
        table.add_column(column, justify="right")
    for record in records:
        table.add_row(
            str(record.step),
            number(record.loss, ".4f"),
            "" if record.held_out_loss is None else number(record.held_out_loss, ".4f"),
            number(record.entropy),
            number(record.grad_norm),
            number(record.learning_rate, ".1e"),
            f"{record.tokens:,}",
            f"{record.sampled_tokens:,}",
            f"{sum(record.phases_s.values()):.1f}",
        )
    return table


def draw_losses(axis: Any, records: Sequence[StepRecord], *, train: str, held_out: str) -> None:
    """Draw the losses of all steps; ``train`` and ``held_out`` are colours."""
    axis.plot([r.step for r in records], [r.loss for r in records], color=train, linewidth=1.5, label="training")
    computed = [(r.step, r.held_out_loss) for r in records if r.held_out_loss is not None]
    if computed:
        axis.plot(*zip(*computed, strict=True), "o-", color=held_out, linewidth=1.4, markersize=5, label="held-out")
    axis.legend(loc="upper right", frameon=False, fontsize=9, ncols=2)
    axis.set_title("Loss, nats a trained token", loc="left", fontsize=11, fontweight="bold")


def draw_rates(axis: Any, records: Sequence[StepRecord], *, train: str) -> None:
    """Draw the learning rate of all steps."""
    axis.plot([r.step for r in records], [r.learning_rate for r in records], color=train, linewidth=1.8)
    axis.set_title("Learning rate", loc="left", fontsize=11, fontweight="bold")


def _newest_held_out(records: Sequence[StepRecord]) -> StepRecord | None:
    return next((record for record in reversed(records) if record.held_out_loss is not None), None)


def _from_to(values: Sequence[tuple[int, float]]) -> str:
    (first, begin), (last, end) = values[0], values[-1]
    if len(values) < _ROWS:
        return f"{number(end, '.4f')} (step {last})"
    return f"{number(begin, '.4f')} -> {number(end, '.4f')} (step {first} -> {last})"
