"""Live screen of a run: its state, roles, engines and newest steps; and the summary at its end."""

from __future__ import annotations

import math
import time
from collections import Counter
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hpcrl.runs.clocks import Clocks
from hpcrl.runs.fleet import Fleet
from hpcrl.runs.metrics import StepRecord
from hpcrl.runs.observe import RunView
from hpcrl.runs.run_progress import Progress
from hpcrl.runs.status import ReplicaJob, RunState
from hpcrl.runs.views.failures import failed_heldout, failure_lines, failure_warnings, heldout_words, set_words
from hpcrl.runs.views.fleet_table import fleet_table
from hpcrl.runs.views.supervised import is_supervised, loss_rows, loss_text, losses_table
from hpcrl.runs.views.usage import Usage
from hpcrl.runs.views.waiting import waiting_words
from hpcrl.runs.views.words import PHASES, duration, number, staleness, state_text

_FAILURE_LINES = 4
"""Maximum number of lines about rollouts that failed."""
_SILENCE_S = 20.0
"""Time in seconds without a write after which a running supervisor, or its filesystem, counts as hung."""


class Room(NamedTuple):
    """Parts of a run that fit a screen.

    Attributes
    ----------
    steps:
        Newest steps, a line each.
    roles:
        Whether roles have a line each, or one line together.
    engines:
        Engines with a line each; unhealthy ones come first. None: all.
    """

    steps: int = 6
    roles: bool = True
    engines: int | None = None


ROOMS = (
    Room(),
    Room(steps=3),
    Room(steps=3, roles=False),
    Room(steps=1, roles=False),
    *(Room(steps=0, roles=False, engines=engines) for engines in (None, 16, 8, 4, 1, 0)),
)
"""Selections of parts, from all to those that fit a small screen."""


def render(
    view: RunView,
    progress: Progress,
    metrics: list[StepRecord],
    usage: Usage | None = None,
    fleet: Fleet | None = None,
    *,
    room: Room = ROOMS[0],
    width: int = 120,
) -> RenderableType:
    """Return the live table: head, progress, measurements, phases, newest steps, roles, engines.

    Parameters
    ----------
    metrics:
        All steps of the run, the oldest first.
    usage, fleet:
        None where they are unknown; then they are not shown.
    room:
        Parts that fit the height of the screen.
    width:
        Columns of the screen.
    """
    lines = [*_job_line(view), *_spare_line(view), *_clock_line(view)]
    parts: list[RenderableType] = [_head(view, progress, usage), *lines, _bar(progress)]
    if progress.last is not None:
        parts += [_measurements(progress, progress.last, metrics), *_set_lines(progress)]
        parts += [_phases(progress.last), Text()]
        if room.steps:
            newest = metrics[-room.steps :]
            table = losses_table(newest) if is_supervised(progress.last) else _steps_table(newest, progress)
            parts += [table, Text()]
    elif progress.evaluations:
        parts += [Text(f"held-out reward {heldout_words(progress.evaluations[0])} before the first step")]
        parts += [*_set_lines(progress), Text()]
    elif progress.evaluation_sets:  # for a run that only evaluates
        parts += [*_set_lines(progress), Text()]
    if view.components:
        parts.append(components_table(view) if room.roles else _components_line(view))
    waits = view.state in (RunState.SUBMITTED, RunState.REQUEUED)  # engines of the previous attempt are gone
    if fleet is not None and fleet.replicas and not view.state.ended and not waits:
        parts += [Text(), fleet_table(fleet, width=width, most=room.engines)]
    parts += [Text(f"warning: {warning}", style="bold yellow") for warning in view.warnings]
    parts += _failure_lines(progress)
    parts += [*_skipped_line(view, progress), *restored_lines(progress)]
    if view.cause is not None:
        parts.append(Text(view.cause.message, style="yellow" if view.state is RunState.CANCELLED else "red"))
        parts += [Text(line) for line in view.cause.details]
    return Group(*parts)


def _failure_lines(progress: Progress) -> list[Text]:
    """Return lines about failed rollouts, as a warning where they are a large share of any environment."""
    style = "bold yellow" if failure_warnings(progress.rollouts) else ""
    lines = failure_lines(progress.rollouts)
    more = [f"and {len(lines) - _FAILURE_LINES} more lines: hpcrl why"] if len(lines) > _FAILURE_LINES else []
    return [Text(line, style=style) for line in [*lines[:_FAILURE_LINES], *more]]


def _skipped_line(view: RunView, progress: Progress) -> list[Text]:
    """Return a line about steps that were made without an update, where there are any."""
    if not progress.skipped_steps:
        return []
    count = "1 step" if progress.skipped_steps == 1 else f"{progress.skipped_steps} steps"
    which = f"{'step' if progress.skipped_steps == 1 else 'the last one step'} {progress.last_skipped_step}"
    what = f"{count} skipped for gradients that are not finite ({which}): hpcrl why {view.name}"
    return [Text(what, style="bold yellow")]


def restored_lines(progress: Progress) -> list[Text]:
    """Return lines about the state that the newest attempt restored and skipped; none where nothing was restored."""
    restored = progress.restored
    changes = [Text(f"changed since the submit: {change}", style="yellow") for change in progress.changes]
    if restored is None or restored.refused or (restored.step is None and not restored.asked):
        return changes
    how = "every byte" if restored.verified == "content" else "sizes of files"
    what = "began again at step 0" if restored.step is None else f"restored step {restored.step} ({how} verified)"
    lines = [Text(f"{what}{f', as asked by {restored.asked}' if restored.asked else ''}")]
    lines += [Text(f"passed over step {entry.step}: {entry.reason}", style="yellow") for entry in restored.skipped]
    if restored.put_aside:
        lines.append(Text(f"put aside until passed again: {', '.join(map(str, restored.put_aside))}", style="yellow"))
    return changes + lines


def _head(view: RunView, progress: Progress, usage: Usage | None) -> Text:
    head = Text.assemble((view.name, "bold"), "  ", state_text(view.state), f"  attempt {max(view.attempt, 1)}")
    head.append(f"  {duration(view.wall_s)} elapsed")
    if progress.eta_s is not None and view.state is RunState.RUNNING:  # otherwise no work is in progress
        head.append(f", about {duration(progress.eta_s)} left")
    if usage is not None and usage.gpu_hours:
        head.append(f"  {usage.gpu_hours:,.1f} GPU-hours")
    silent_s = 0.0 if view.heartbeat_s is None else time.time() - view.heartbeat_s
    if silent_s > _SILENCE_S and not view.state.ended:
        head.append(f"  no heartbeat for {duration(silent_s)}", style="bold red")
    return head


def _job_line(view: RunView) -> list[Text]:
    """Return lines about the origin of the start weights and about the Slurm job, where there are any."""
    job = view.job
    begun = [Text(f"began with {view.origin}")] if view.origin else []
    if job is None:
        return begun
    text = Text.assemble(f"Slurm job {job.job_id} ", state_text(job.state))
    if job.nodes:
        text.append(f" on {len(job.nodes)} node{'s' if len(job.nodes) > 1 else ''}")
    if job.restarts:
        text.append(f", requeued {job.restarts} time{'s' if job.restarts > 1 else ''}")
    if job.waiting:
        text.append(waiting_words(view, job))
    if job.warning:
        text.append(f"  {job.warning.splitlines()[0]}", style="yellow")
    return [*begun, text]


def _spare_line(view: RunView) -> list[Text]:
    """Return a line about spare nodes and lost ones, where the job was given spare nodes."""
    if not view.spare_nodes and not view.lost_nodes:
        return []
    spare = f"spare nodes {', '.join(view.spare_nodes) or 'none left'}"
    lost = "; ".join(f"{node}: {why}" for node, why in view.lost_nodes.items())
    return [Text(spare + (f"   lost {lost}" if lost else ""), "yellow" if lost else "")]


def _clock_line(view: RunView) -> list[Text]:
    """Return a line about nodes whose clocks differ much, where there are any."""
    far = Clocks(view.clocks).far
    if not far:
        return []
    shown = [f"{node} {clock} {'ahead' if clock.ahead_s > 0 else 'behind'}" for node, clock in sorted(far.items())[:4]]
    more = f" and {len(far) - 4} more" if len(far) > 4 else ""
    what = f"clocks are off: {', '.join(shown)}{more}; times here are corrected, those in logs are not"
    return [Text(what, "yellow")]


def _bar(progress: Progress) -> Table:
    row = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=progress.total_steps, completed=progress.steps, width=40)
    row.add_row(f"step {progress.steps}/{progress.total_steps}", bar)
    return row


def _set_lines(progress: Progress) -> list[Text]:
    """Return lines about the newest evaluation of each set."""
    return [
        Text(f"held-out set {name}: {set_words(each)}, after step {each.version}")
        for name, each in progress.evaluation_sets.items()
    ]


def _measurements(progress: Progress, last: StepRecord, metrics: list[StepRecord]) -> Text:
    supervised = is_supervised(last)
    text = loss_text(metrics or [last]) if supervised else Text.assemble("reward ", (number(last.reward_mean), "bold"))
    if last.reward_count:
        text.append(f" of {last.reward_count:,}")
    if progress.evaluations:
        first, newest = progress.evaluations[0], progress.evaluations[-1]
        text.append("   held-out ")
        text.append(number(newest.reward), style="bold")
        text.append(f" of {newest.count:,}" if newest.count else "")
        text.append(failed_heldout(newest))
        text.append(f" after step {newest.version} (start {number(first.reward)}{failed_heldout(first, short=True)})")
    if not supervised:
        text.append(f"   {staleness(last, progress)}")
    text.append(f"   {number(last.tokens_per_s, ',.0f')} tokens/s")
    if progress.checkpoint_step is not None:
        text.append(f"   checkpoint at step {progress.checkpoint_step}")
        if progress.checkpoint_age_s is not None:
            text.append(f", {duration(progress.checkpoint_age_s)} ago")
    return text


def _phases(record: StepRecord, width: int = 60) -> Text:
    """Return the last step as a bar of its phases."""
    seconds = sum(record.phases_s.values())
    bar, legend = Text(), Text()
    for phase, (label, colour) in PHASES.items():
        share = record.phases_s.get(phase, 0.0) / seconds if seconds else 0.0
        if share >= 0.005:
            bar.append("█" * max(1, round(share * width)), style=colour)
            legend.append(f"  {label} {share:.0%}", style=colour)
    return Text.assemble(f"last step {seconds:.1f} s ", bar, legend)


def _steps_table(records: list[StepRecord], progress: Progress) -> Table:
    held_out = {evaluation.version: number(evaluation.reward) for evaluation in progress.evaluations}
    table = Table(box=None, header_style="dim", pad_edge=False)
    # share of routed experts that differ, where engines return theirs
    routes = ["routes"] if any(record.routing_mismatch is not None for record in records) else []
    # number of rollouts that the reward is a mean over, where 80 columns suffice
    counts = ["n"] if not routes and any(record.reward_count for record in records) else []
    for column in ("step", "reward", *counts, "held-out", "loss", "kl", *routes, "entropy", "staleness", "seconds"):
        table.add_column(column, justify="right")
    for record in records:
        table.add_row(
            str(record.step),
            number(record.reward_mean),
            *([f"{record.reward_count:,}" if record.reward_count else "-"] if counts else []),
            held_out.get(record.step, ""),
            number(record.loss, "+.4f"),
            number(record.mismatch_kl, ".1e"),
            *(["" if record.routing_mismatch is None else number(record.routing_mismatch, ".1e")] if routes else []),
            number(record.entropy),
            number(record.staleness_mean, ".1f"),
            f"{sum(record.phases_s.values()):.1f}",
        )
    return table


def components_table(view: RunView) -> Table:
    """Return a table of the roles: state, node, pid, port, time since start."""
    table = Table(box=None, header_style="dim", pad_edge=False)
    jobs = any(component.job is not None for component in view.components)
    for column in ("role", "state", *(["node"] if _has_nodes(view) else []), "pid", "port", "up", *["job"] * jobs):
        table.add_column(column, justify="right" if column in ("pid", "port", "up") else "left")
    now_s = time.time()
    for c in view.components:
        up = None if c.started_at_s is None else (c.ended_at_s or view.ended_at_s or now_s) - c.started_at_s
        node = [_short_list(c.nodes)] if _has_nodes(view) else []
        ends = [str(c.pid or "-"), str(c.port or "-"), duration(up)]
        own = [_own_job(c.job)] if jobs else []
        table.add_row(f"{c.role} {c.replica}", state_text(c.state), *node, *ends, *own)
    return table


def _components_line(view: RunView) -> Text:
    """Return one line about the roles: how many are in which state."""
    counts = Counter((component.state.value, component.role) for component in view.components)
    text = Text("roles  ", style="dim")
    for i, ((state, role), count) in enumerate(counts.items()):
        text.append_text(Text.assemble("  " if i else "", f"{count} {role}s " if count > 1 else f"{role} "))
        text.append_text(state_text(state))
    return text


def _own_job(job: ReplicaJob | None) -> Text:
    """Return the job of one replica and its problem."""
    if job is None:
        return Text("-")
    text = Text.assemble("none yet" if job.job_id is None else f"{job.job_id} ", state_text(job.state))
    if job.reason not in ("", "None"):
        text.append(f" ({job.reason})")
    if job.replaced:
        text.append(f", replaced {job.replaced} time{'s' if job.replaced > 1 else ''}", style="yellow")
    return text


def _has_nodes(view: RunView) -> bool:
    return any(component.nodes for component in view.components)


def _short_list(nodes: list[str]) -> str:
    """Return the first and last node of a replica, whose nodes are adjacent."""
    return nodes[0] if len(nodes) == 1 else f"{nodes[0]} .. {nodes[-1]}" if nodes else "-"


def summary(view: RunView, progress: Progress, metrics: list[StepRecord], *, picture: str = "") -> Table:
    """Return the summary at the end of a run; ``picture`` is the path of the report, or why it is missing."""
    table = Table.grid(padding=(0, 2))
    table.add_row("run", Text.assemble((view.name, "bold"), "  ", state_text(view.state)))
    if view.cause is not None:
        table.add_row("cause", Text("\n".join([view.cause.message, *view.cause.details])))
    for line in restored_lines(progress):
        table.add_row("start", line)
    if len(progress.evaluations) > 1:
        first, last = progress.evaluations[0], progress.evaluations[-1]
        table.add_row(
            "held-out reward",
            f"{number(first.reward)}{failed_heldout(first, short=True)} -> {heldout_words(last)} "
            f"(after step {first.version} -> {last.version})",
        )
    for name, each in progress.evaluation_sets.items():
        table.add_row(f"set {name}", f"{set_words(each)} (after step {each.version})")
    table.add_row("steps", f"{progress.steps} of {progress.total_steps} in {duration(view.wall_s)}")
    for words in failure_lines(progress.rollouts):
        table.add_row("" if words.startswith(" ") else "rollouts", Text(words, style="yellow"))
    if progress.skipped_steps:
        which = f"{progress.skipped_steps}, the last one step {progress.last_skipped_step}: gradients were not finite"
        table.add_row("skipped steps", Text(which, style="yellow"))
    if metrics and is_supervised(metrics[-1]):
        for name, words in loss_rows(metrics):
            table.add_row(name, words)
    elif metrics:
        seconds = sum(sum(record.phases_s.values()) for record in metrics)
        waiting = sum(record.phases_s.get("wait_batch", 0.0) for record in metrics)
        known = [record.staleness_mean for record in metrics if math.isfinite(record.staleness_mean)]
        mean = sum(known) / len(known) if known else math.nan
        worst = max(record.staleness_max for record in metrics)
        bound = "" if progress.staleness_bound is None else f", bound {progress.staleness_bound}"
        table.add_row("staleness", f"{number(mean, '.2f')} on average, largest {worst}{bound}")
        table.add_row("waiting", f"{waiting / seconds:.0%} of the trainer's time" if seconds else "-")
    if picture:
        table.add_row("picture", Text(picture, overflow="fold"))
    return table
