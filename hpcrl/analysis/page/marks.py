"""Marks of a run: faults and restarts, with their times and their places on an axis of steps."""

from __future__ import annotations

from typing import Any, NamedTuple

from hpcrl.analysis.series import RunHistory
from hpcrl.runs.events import Event

_WORDS = {
    "component.restarting": ("fault", "{role} {replica} failed and is restarted: {cause}"),
    "component.lost": ("fault", "{role} {replica} was lost: {cause}"),
    "component.hung": ("fault", "{role} {replica} hung: {problem}"),
    "replica.lost": ("fault", "{role} {replica} was lost: {why}"),
    "engine.away": ("fault", "{engine} is away: {why}"),
    "engine.wrong_weights": ("fault", "{engine} computed with other weights than those of version {version}"),
    "engine.read_timed_out": ("fault", "{engine} has not read version {version} in time: {why}"),
    "router.away": ("fault", "the router does not answer: {why}"),
    "environment.lost": ("fault", "a process of environment {environment} was lost: {why}"),
    "rollouts.failing": ("fault", "rollouts of environment {environment} fail ({cause}): {what}"),
    "sandboxes.evicted": ("fault", "all sandboxes of a node used too much memory (environment {environment})"),
    "store.segment_lost": ("fault", "the segment {segment} left the KV pool"),
    "trainer.checkpoint_failed": ("fault", "the checkpoint of step {step} failed: {reason}"),
    "trainer.step_skipped": ("fault", "step {step} was skipped: {what}"),
    "trainer.version_refused": ("fault", "the filesystem refused a version: {what}"),
    "run.space_gone": ("fault", "no space: {what}"),
    "guard.supervisor_lost": ("fault", "the supervisor of {role} {replica} was lost"),
    "nodes.excluded": ("fault", "nodes to avoid: {nodes}"),
    "nodes.replaced": ("restart", "spare nodes take the place of lost ones, and the next attempt begins: {cause}"),
    "attempt.retried": ("restart", "the attempt failed, and the next begins in the same nodes: {cause}"),
    "supervisor.warned": ("restart", "Slurm warned that the time ends"),
}
"""Kinds of marks and their words by the kind of event; docs/events.md has the fields."""
_LONGEST = 300


class Mark(NamedTuple):
    """A fault or a restart.

    Attributes
    ----------
    kind:
        ``fault``, ``restart`` or ``end``.
    step:
        Place on an axis of steps.
    what:
        What happened, in words; parts of them are from programs of others.
    """

    kind: str
    time_s: float
    step: float
    attempt: int
    what: str


def read_marks(history: RunHistory) -> list[Mark]:
    """Return the faults and restarts of a run in time order."""
    found = [mark for event in history.events if (mark := _mark(history, event)) is not None]
    view = history.view
    if view.cause is not None and view.ended_at_s is not None:
        place = history.step_at(view.ended_at_s)
        found.append(
            Mark("end", view.ended_at_s, place, view.attempt, _shortened(f"{view.state}: {view.cause.message}"))
        )
    return sorted(found, key=lambda mark: mark.time_s)


def _mark(history: RunHistory, event: Event) -> Mark | None:
    if event.kind == "attempt.started":
        if event.attempt <= 1:
            return None
        step = event.data.get("checkpoint_step")
        begin = "without a checkpoint" if step is None else f"from the checkpoint of step {step}"
        kind, words = "restart", f"attempt {event.attempt} begins {begin}"
    elif event.kind in _WORDS:
        kind, form = _WORDS[event.kind]
        words = form.format_map(_Known(event.data))
    else:
        return None
    return Mark(kind, event.time_s, history.step_at(event.time_s), event.attempt, _shortened(words))


def _shortened(words: str) -> str:
    line = " ".join(words.split())
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"


class _Known(dict[str, Any]):
    """Fields of an event; one that is missing is shown as unknown."""

    def __missing__(self, key: str) -> str:
        return "?"
