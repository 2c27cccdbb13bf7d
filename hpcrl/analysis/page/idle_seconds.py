"""Seconds of each role by what it did: at work, idle for a cause, or unknown where the files of a run do not say."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hpcrl.analysis.bounds.rollout_states import TimeHolder
from hpcrl.analysis.bounds.step_waits import WAIT, StepWaits
from hpcrl.analysis.page.time_spans import (
    Span,
    away_spans,
    evaluation_spans,
    lane_of,
    phase_intervals,
    state_spans,
)
from hpcrl.analysis.series import RunHistory
from hpcrl.config.recipe import Recipe
from hpcrl.runs.metrics import StepRecord
from hpcrl.runs.views.usage import attempt_spans

_Interval = tuple[float, float]
ENGINES = ("engine", "prefill", "decode")
_WORK = {"forward_backward", "optimizer", "held_out", "other"}
_OTHER_PHASES = {
    "publish": "writes a version",
    "swap": "hands the devices over",
    "checkpoint": "steps are blocked by a checkpoint",
}
_UNKNOWN_ENGINE = "ready: sampling or idle, which the files of a run do not distinguish"
_UNKNOWN_ROLE = "ready: the files of a run do not say how busy it was"
_UNKNOWN_TRAINER = "between records: steps that were computed again, the end of attempts"
_HOLDERS = {
    TimeHolder.ENGINES: "they were at an engine, its queue included",
    TimeHolder.ENVIRONMENTS: "they were in the code of an environment",
    TimeHolder.SANDBOXES: "they were in an environment whose tools run in sandboxes",
    TimeHolder.JUDGE: "they had their last reply, and no reward yet",
    TimeHolder.HAND_OFF: "a version was written or loaded",
    TimeHolder.ADMISSION: "they had not begun: the staleness bound or max_in_flight",
    TimeHolder.BATCH: "they had all ended, and the batch was built",
    TimeHolder.UNKNOWN: "the times of their requests are not on record",
}
"""Causes by what the rollouts of a batch did."""
_PARTS, _STEPS_A_PART = 4, 15
"""Parts of a long run of which some steps each are read: rollouts of a hundred steps share a file."""


class RoleSeconds(NamedTuple):
    """Seconds of a role, all replicas together.

    Attributes
    ----------
    kind:
        ``work``, ``idle`` or ``unknown``.
    cause:
        What it did, or waited for.
    share:
        Of the seconds in which attempts held its nodes.
    """

    role: str
    kind: str
    cause: str
    seconds: float
    share: float


def role_seconds(history: RunHistory, recipe: Recipe) -> list[RoleSeconds]:
    """Return the seconds of each role by kind and cause; they add up to those that attempts held."""
    spans, attempts = state_spans(history), attempt_spans(history.run, history.view)
    aways, pauses = away_spans(history), _pauses(history)
    lanes: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        lanes[span.lane].append(span)
    found: dict[str, dict[tuple[str, str], float]] = defaultdict(lambda: defaultdict(float))
    held: dict[str, float] = defaultdict(float)
    for lane, own in lanes.items():
        role = lane.split()[0]
        mine = {span.about for span in own}
        whole = [span for number, span in attempts.items() if f"attempt {number}" in mine]
        held[role] += sum(end - begin for begin, end in whole)
        ready = [(span.begin_s, span.end_s) for span in own if span.what == "ready"]
        for key, seconds in _outside(own, whole).items():
            found[role][key] += seconds
        if role == "trainer":
            parts = _trainer(history, ready, spans, recipe)
        elif role in ENGINES:
            parts = _engine([span for span in aways if span.lane == lane], pauses.get(lane, 0.0), ready)
        else:
            parts = {("unknown", _UNKNOWN_ROLE): _total(ready)}
        for key, seconds in parts.items():
            found[role][key] += seconds
    order = {"work": 0, "idle": 1, "unknown": 2}
    return [
        RoleSeconds(role, kind, cause, seconds, seconds / held[role])
        for role in sorted(found)
        for (kind, cause), seconds in sorted(found[role].items(), key=lambda item: (order[item[0][0]], -item[1]))
        if seconds > 0.0 and held[role] > 0.0
    ]


def _outside(own: Sequence[Span], attempts: Sequence[_Interval]) -> dict[tuple[str, str], float]:
    """Return the seconds in which a replica was not ready."""
    found: dict[tuple[str, str], float] = defaultdict(float)
    after_fault, attempt = False, ""
    for span in own:
        # the first start of an attempt is none after a fault
        after_fault, attempt = after_fault and span.about == attempt, span.about
        if span.what == "starting":
            cause = "starts again after a fault" if after_fault else "starts"
            found["idle", cause] += span.end_s - span.begin_s
            after_fault = False
        elif span.what == "restarting":
            found["idle", "waits before a restart"] += span.end_s - span.begin_s
            after_fault = True
        elif span.what == "stopping":
            found["idle", "stops"] += span.end_s - span.begin_s
    _, rest = divided(attempts, [(span.begin_s, span.end_s) for span in own])
    found["idle", "has no process: waits for other roles, or has ended"] += _total(rest)
    return found


def _trainer(
    history: RunHistory, ready: Sequence[_Interval], states: Sequence[Span], recipe: Recipe
) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], float] = defaultdict(float)
    for record in history.records:
        for phase, seconds in record.phases_s.items():
            if phase in _WORK:
                found["work", "forward, backward, optimizer"] += seconds
            elif phase != WAIT:
                found["idle", _OTHER_PHASES.get(phase, phase)] += seconds
    for cause, seconds in waiting_causes(history, states, recipe).items():
        found["idle", f"waits for rollouts: {cause}"] += seconds
    steps = [(record.time_s - sum(record.phases_s.values()), record.time_s) for record in history.records]
    _, rest = divided(ready, steps)
    found["unknown", _UNKNOWN_TRAINER] += _total(rest)
    return found


def waiting_causes(history: RunHistory, states: Sequence[Span], recipe: Recipe) -> dict[str, float]:
    """Return the seconds in which the trainer waits for a batch, by what happened meanwhile.

    The first of the causes that hold up all rollouts counts. The rest is divided by what the rollouts of the batch did,
    as ``hpcrl why --slow`` divides it (`hpcrl.analysis.bounds.waiting_time`).
    """
    waits = phase_intervals(history.records, WAIT)
    down = [span for span in states if span.lane.split()[0] in ENGINES and span.what in ("restarting", "starting")]
    first_s = {record.attempt: record.time_s for record in reversed(history.records)}
    attempts = attempt_spans(history.run, history.view)
    starts = [(begin_s, first_s[number]) for number, (begin_s, _) in attempts.items() if number in first_s]
    covers: tuple[tuple[str, Iterable[_Interval]], ...] = (
        ("an engine was away or started", _intervals([*down, *away_spans(history)])),
        ("the first rollouts after a start", starts),
        ("engines evaluated held-out prompts", _intervals(evaluation_spans(history))),
    )
    found = {}
    for cause, cover in covers:
        covered, waits = divided(waits, cover)
        found[cause] = _total(covered)
    return found | _rollout_causes(history, waits, recipe)


def _rollout_causes(history: RunHistory, waits: Sequence[_Interval], recipe: Recipe) -> dict[str, float]:
    """Return the seconds of some waits by what the rollouts of their batches did.

    Of a long run some steps are read, and stand for the others.
    """
    by_step: list[tuple[StepRecord, list[_Interval]]] = []
    # clocks of nodes may differ, so that steps of two attempts overlap
    waits = sorted(waits)
    begins = [begin_s for begin_s, _ in waits]
    for record in history.records:
        begin_s = record.time_s - sum(record.phases_s.values())
        end_s = begin_s + record.phases_s.get(WAIT, 0.0)
        if own := waits[bisect_left(begins, begin_s) : bisect_left(begins, end_s)]:
            by_step.append((record, own))
    read = _chosen(by_step)
    step_waits = StepWaits(history.run, recipe, history.events)
    found: dict[str, float] = defaultdict(float)
    for record, own in read:
        for (holder, _), seconds in step_waits.parts_of(record, own).items():
            found[_HOLDERS[holder]] += seconds
    total = _total(waits)
    if not (known := sum(found.values())):
        return {_HOLDERS[TimeHolder.UNKNOWN]: total}
    note = "" if len(read) == len(by_step) else f" (as in {len(read)} of {len(by_step):,} steps)"
    return {f"{cause}{note}": seconds * total / known for cause, seconds in found.items()}


def _chosen(steps: list[tuple[StepRecord, list[_Interval]]]) -> list[tuple[StepRecord, list[_Interval]]]:
    """Return all steps of a short run; of a long one a few successive steps of each part, the newest among them."""
    if len(steps) <= _PARTS * _STEPS_A_PART:
        return steps
    lasts = [round(len(steps) * (part + 1) / _PARTS) for part in range(_PARTS)]
    return [each for last in lasts for each in steps[last - _STEPS_A_PART : last]]


def _pauses(history: RunHistory) -> dict[str, float]:
    """Return the seconds in which each engine paused for new versions, by lane."""
    found: dict[str, float] = defaultdict(float)
    for event in history.of_kind("engine.weights_updated"):
        if isinstance(pause := event.data.get("pause_s"), int | float):
            found[lane_of(event.data.get("engine"))] += float(pause)
    return found


def _engine(aways: Sequence[Span], pauses: float, ready: Sequence[_Interval]) -> dict[tuple[str, str], float]:
    away, rest = divided(ready, _intervals(aways))
    return {
        ("idle", "ready and away: it did not answer, or could not load a version"): _total(away),
        ("idle", "pauses for a new version"): min(pauses, _total(rest)),
        ("unknown", _UNKNOWN_ENGINE): max(0.0, _total(rest) - pauses),
    }


def _intervals(spans: Iterable[Span]) -> list[_Interval]:
    return [(span.begin_s, span.end_s) for span in spans]


def _total(intervals: Iterable[_Interval]) -> float:
    return sum(max(0.0, end - begin) for begin, end in intervals)


def divided(intervals: Iterable[_Interval], cover: Iterable[_Interval]) -> tuple[list[_Interval], list[_Interval]]:
    """Divide intervals into their parts inside and outside of a cover, whose intervals may overlap."""
    union: list[list[float]] = []
    for begin, end in sorted(cover):
        if union and begin <= union[-1][1]:
            union[-1][1] = max(union[-1][1], end)
        else:
            union.append([begin, end])
    begins = [begin for begin, _ in union]
    inside: list[_Interval] = []
    outside: list[_Interval] = []
    for begin, end in intervals:
        at = begin
        for place in range(max(0, bisect_right(begins, begin) - 1), len(union)):
            from_s, to_s = max(union[place][0], at), min(union[place][1], end)
            if union[place][0] >= end:
                break
            if to_s <= from_s:
                continue
            if from_s > at:
                outside.append((at, from_s))
            inside.append((from_s, to_s))
            at = to_s
        if at < end:
            outside.append((at, end))
    return inside, outside
