"""Seconds of each role by what it did: at work, idle for a cause, or unknown where the files of a run do not say."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hpcrl.analysis.page.time_spans import (
    Span,
    away_spans,
    evaluation_spans,
    lane_of,
    phase_intervals,
    state_spans,
    update_intervals,
)
from hpcrl.analysis.series import RunHistory
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


def role_seconds(history: RunHistory) -> list[RoleSeconds]:
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
            parts = _trainer(history, ready, spans)
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


def _trainer(history: RunHistory, ready: Sequence[_Interval], states: Sequence[Span]) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], float] = defaultdict(float)
    for record in history.records:
        for phase, seconds in record.phases_s.items():
            if phase in _WORK:
                found["work", "forward, backward, optimizer"] += seconds
            elif phase != "wait_batch":
                found["idle", _OTHER_PHASES.get(phase, phase)] += seconds
    for cause, seconds in waiting_causes(history, states).items():
        found["idle", f"waits for rollouts: {cause}"] += seconds
    steps = [(record.time_s - sum(record.phases_s.values()), record.time_s) for record in history.records]
    _, rest = divided(ready, steps)
    found["unknown", _UNKNOWN_TRAINER] += _total(rest)
    return found


def waiting_causes(history: RunHistory, states: Sequence[Span]) -> dict[str, float]:
    """Return the seconds in which the trainer waits for a batch, by what happened meanwhile; the first cause counts."""
    waits = phase_intervals(history.records, "wait_batch")
    down = [span for span in states if span.lane.split()[0] in ENGINES and span.what in ("restarting", "starting")]
    first_s = {record.attempt: record.time_s for record in reversed(history.records)}
    attempts = attempt_spans(history.run, history.view)
    starts = [(begin_s, first_s[number]) for number, (begin_s, _) in attempts.items() if number in first_s]
    covers: tuple[tuple[str, Iterable[_Interval]], ...] = (
        ("an engine was away or started", _intervals([*down, *away_spans(history)])),
        ("the first rollouts after a start", starts),
        ("engines evaluated held-out prompts", _intervals(evaluation_spans(history))),
        ("engines read a version", update_intervals(history)),
    )
    found = {}
    for cause, cover in covers:
        covered, waits = divided(waits, cover)
        found[cause] = _total(covered)
    found["engines or environments had not finished rollouts; the files do not distinguish these"] = _total(waits)
    return found


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
