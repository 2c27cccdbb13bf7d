"""Time of a step by its parts, over a run and now, from its files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import msgspec

from hpcrl.analysis.bounds.rollout_states import TimeHolder
from hpcrl.analysis.bounds.step_waits import WAIT, StepWaits
from hpcrl.analysis.bounds.tried_settings import WARM_STEPS
from hpcrl.analysis.bounds.waiting_time import Parts
from hpcrl.errors import UsageError
from hpcrl.runs.events import read_events
from hpcrl.runs.metrics import StepRecord, read_metrics
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.views.words import PHASES

_NOW_STEPS = 20
"""Maximum number of newest steps that are called now."""
_MOST_STEPS = 200
"""Maximum number of steps whose rollouts are read; evenly spaced ones of a longer run stand for all."""
TRAINER = "trainer"
SIDES: dict[str, str] = {
    **{holder.value: holder.value for holder in TimeHolder},
    "publish": TimeHolder.HAND_OFF.value,
    "swap": TimeHolder.HAND_OFF.value,
    "checkpoint": "checkpoint",
}
"""Side of each part of a step; every other phase is the trainer's own work."""


class TimePart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the time of a step.

    Attributes
    ----------
    name:
        A holder (`hpcrl.analysis.bounds.rollout_states.TimeHolder`) of the wait for a batch, or a phase of the trainer.
    side:
        What it belongs to: engines, environments, trainer, and so on.
    seconds, share:
        Mean seconds a step, and share of the step.
    by_environment:
        Seconds of these by environment, where it is known.
    """

    name: str
    side: str
    seconds: float
    share: float
    by_environment: dict[str, float] = {}


class StepWindow(msgspec.Struct, frozen=True, kw_only=True):
    """Some steps of a run, and where their time went.

    Attributes
    ----------
    first, last, steps:
        First and last step, and how many records there are.
    step_s:
        Mean seconds of a step; the parts add up to it.
    attributed:
        Number of steps whose waits were attributed from their rollouts; the others are assumed to be alike.
    parts:
        The largest first.
    """

    first: int
    last: int
    steps: int
    step_s: float
    attributed: int
    parts: list[TimePart]

    def sides(self) -> dict[str, float]:
        """Return the share of each side, the largest first."""
        found = defaultdict[str, float](float)
        for part in self.parts:
            found[part.side] += part.share
        return dict(sorted(found.items(), key=lambda item: -item[1]))


def read_windows(run: RunDir) -> tuple[StepWindow, StepWindow]:
    """Return where the time of a step goes over the run, and in its newest steps.

    Raises
    ------
    UsageError
        The run has no step yet.
    """
    metrics = [record for record in read_metrics(run) if sum(record.phases_s.values()) > 0]
    if not metrics:
        raise UsageError(f"{run.name} has no step yet, so its time is unknown")
    warm = metrics[WARM_STEPS:] if len(metrics) > 2 * WARM_STEPS else metrics
    newest = [record for record in warm if record.attempt == warm[-1].attempt]
    newest = newest[-min(_NOW_STEPS, max(5, len(newest) // 4)) :]
    waits = StepWaits(run, run.recipe(), read_events(run))
    chosen = {record.step: record for record in (*_spaced(warm, _MOST_STEPS), *newest)}
    parts = {step: waits.parts(record) for step, record in sorted(chosen.items())}
    return _window(warm, parts), _window(newest, parts)


def _spaced(records: Sequence[StepRecord], most: int) -> list[StepRecord]:
    if len(records) <= most:
        return list(records)
    return [records[round(number * (len(records) - 1) / (most - 1))] for number in range(most)]


def _window(records: Sequence[StepRecord], waits: Mapping[int, Parts]) -> StepWindow:
    """Return the parts of some steps; waits of steps that were not read are divided as those of the others."""
    count = len(records)
    total = sum(sum(record.phases_s.values()) for record in records)
    phases = defaultdict[str, float](float)
    for record in records:
        for name, seconds in record.phases_s.items():
            phases[name] += seconds
    known = defaultdict[tuple[TimeHolder, str], float](float)
    read = [record for record in records if record.step in waits]
    for record in read:
        for part, seconds in waits[record.step].items():
            known[part] += seconds
    attributed = sum(known.values())
    wait_s = phases.pop(WAIT, 0.0)
    scale = wait_s / attributed if attributed else 0.0
    holders: dict[str, dict[str, float]] = defaultdict(dict)
    for (holder, of), seconds in known.items():
        holders[holder.value][of] = seconds * scale / count
    if wait_s and not attributed:
        holders[TimeHolder.UNKNOWN.value][""] = wait_s / count
    found = [
        TimePart(
            name=name,
            side=SIDES[name],
            seconds=sum(by.values()),
            share=sum(by.values()) * count / total,
            by_environment={of: seconds for of, seconds in sorted(by.items()) if of},
        )
        for name, by in holders.items()
    ]
    for name, seconds in phases.items():
        if seconds > 0:
            side = SIDES.get(name, TRAINER)
            found.append(TimePart(name=name, side=side, seconds=seconds / count, share=float(seconds) / total))
    unread = TimeHolder.UNKNOWN.value
    return StepWindow(
        first=records[0].step,
        last=records[-1].step,
        steps=count,
        step_s=total / count,
        attributed=sum(all(holder.value != unread for holder, _ in waits[record.step]) for record in read),
        parts=sorted((part for part in found if part.seconds > 0), key=lambda part: -part.seconds),
    )


def part_label(name: str) -> str:
    """Return the words for a part of a step."""
    return PHASES[name][0] if name in PHASES else name


def largest_side(window: StepWindow) -> tuple[str, float]:
    """Return the side with most of the time of a step, and its share."""
    return next(iter(window.sides().items()))


def environments_of(window: StepWindow, side: str, words: Callable[[str], str] = str) -> str:
    """Return the environments of a side, the one with most time first; empty where they are unknown."""
    seconds = defaultdict[str, float](float)
    for part in window.parts:
        if part.side == side:
            for name, own_s in part.by_environment.items():
                seconds[name] += own_s
    return ", ".join(words(name) for name in sorted(seconds, key=lambda name: -seconds[name]))
