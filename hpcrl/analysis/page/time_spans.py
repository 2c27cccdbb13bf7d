"""Spans of time of a run by role: states of replicas, phases of steps, weight updates, evaluations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from hpcrl.analysis.page.marks import Mark
from hpcrl.analysis.series import RunHistory
from hpcrl.runs.metrics import StepRecord
from hpcrl.runs.status import ComponentState
from hpcrl.runs.views.usage import attempt_spans
from hpcrl.runs.views.words import PHASES

NEWEST_STEPS = 30
"""Number of steps of the detailed timeline."""
_MOST_SPANS = 4000
"""Maximum number of bars of a timeline."""


class Span(NamedTuple):
    """A span of time.

    Attributes
    ----------
    lane:
        Role and replica: ``engine 0``.
    begin_s, end_s:
        Seconds since the epoch.
    what:
        State or phase.
    about:
        Details for a reader.
    """

    lane: str
    begin_s: float
    end_s: float
    what: str
    about: str = ""


def state_spans(history: RunHistory) -> list[Span]:
    """Return the states of each replica over the whole run."""
    attempts, spans = attempt_spans(history.run, history.view), list[Span]()
    last: dict[tuple[int, str], tuple[float, str]] = {}

    def close(attempt: int, lane: str, end_s: float) -> None:
        begin_s, state = last.pop((attempt, lane))
        if state not in _NO_PROCESS:
            spans.append(Span(lane, begin_s, end_s, state.lower(), f"attempt {attempt}"))

    for event in history.of_kind("component.state", "component.restarting"):
        lane = f"{event.data.get('role', '?')} {event.data.get('replica', '?')}"
        state = str(event.data.get("state", ComponentState.RESTARTING.value))
        if (event.attempt, lane) in last:
            close(event.attempt, lane, event.time_s)
        last[event.attempt, lane] = (event.time_s, state)
    for attempt, lane in list(last):
        if attempt in attempts:
            close(attempt, lane, max(attempts[attempt][1], last[attempt, lane][0]))
    return sorted(spans, key=lambda span: (span.lane, span.begin_s))


_NO_PROCESS = {state.value for state in ComponentState if state.ended} | {ComponentState.PENDING.value}


def phase_spans(records: Iterable[StepRecord]) -> list[Span]:
    """Return the phases of steps; a step begins before its end by the sum of its phases.

    The order of phases is that of `hpcrl.runs.views.words.PHASES`: a record has their seconds and not their times.
    """
    spans = []
    for record in records:
        at = record.time_s - sum(record.phases_s.values())
        for phase in [*PHASES, *(name for name in record.phases_s if name not in PHASES)]:
            seconds = record.phases_s.get(phase, 0.0)
            if seconds > 0.0:
                spans.append(Span("trainer 0", at, at + seconds, phase, f"step {record.step}"))
            at += seconds
    return spans


def phase_intervals(records: Iterable[StepRecord], phase: str) -> list[tuple[float, float]]:
    """Return the begin and the end of a phase of each step that has it, as `phase_spans` places them."""
    before = list(PHASES)[: list(PHASES).index(phase)]
    found = []
    for record in records:
        phases_s = record.phases_s
        if (seconds := phases_s.get(phase, 0.0)) > 0.0:
            begin_s = record.time_s - sum(phases_s.values()) + sum(phases_s.get(name, 0.0) for name in before)
            found.append((begin_s, begin_s + seconds))
    return found


def update_spans(history: RunHistory) -> list[Span]:
    """Return the times of the weight updates of engines."""
    spans = []
    for event in history.of_kind("engine.weights_updated"):
        seconds = event.data.get("seconds")
        if isinstance(seconds, int | float):
            about = f"version {event.data.get('version')}, pause {_seconds(event.data.get('pause_s'))}"
            lane = lane_of(event.data.get("engine"))
            spans.append(Span(lane, event.time_s - float(seconds), event.time_s, "weight update", about))
    return spans


def away_spans(history: RunHistory) -> list[Span]:
    """Return the times in which engines were away; one that did not come back is away until its attempt ends."""
    attempts, spans = attempt_spans(history.run, history.view), list[Span]()
    begun: dict[tuple[int, str], tuple[float, str]] = {}
    for event in history.of_kind("engine.away", "engine.back"):
        key = (event.attempt, lane_of(event.data.get("engine")))
        if event.kind == "engine.away":
            begun.setdefault(key, (event.time_s, str(event.data.get("why", ""))))
        elif key in begun:
            begin_s, why = begun.pop(key)
            spans.append(Span(key[1], begin_s, event.time_s, "away", why))
    for (attempt, lane), (begin_s, why) in begun.items():
        if attempt in attempts:
            spans.append(Span(lane, begin_s, max(begin_s, attempts[attempt][1]), "away", why))
    return spans


def evaluation_spans(history: RunHistory) -> list[Span]:
    """Return the times of held-out evaluations on the engines of the run."""
    spans = []
    for event in history.of_kind("evaluation", "evaluation.set", "evaluation.asked"):
        seconds = event.data.get("seconds")
        if isinstance(seconds, int | float) and seconds > 0:
            about = f"version {event.data.get('version')}"
            spans.append(Span("orchestrator 0", event.time_s - float(seconds), event.time_s, "evaluation", about))
    return spans


def timelines(history: RunHistory, marks: Sequence[Mark]) -> list[dict[str, Any]]:
    """Return the timeline of the whole run and that of its newest steps, as plain values; those without spans not."""
    newest = history.records[-NEWEST_STEPS:]
    detailed = phase_spans(newest)
    if detailed:
        begin_s, end_s = detailed[0].begin_s, detailed[-1].end_s
        others = [*update_spans(history), *away_spans(history), *evaluation_spans(history)]
        detailed += [span for span in others if span.end_s > begin_s and span.begin_s < end_s]
    detailed = [span._replace(what=PHASES[span.what][0]) if span.what in PHASES else span for span in detailed]
    found = (
        ("roles", "Roles over the whole run, by state", state_spans(history)),
        ("steps", f"Newest {len(newest)} steps by role", detailed),
    )
    return [_document(name, title, spans, marks) for name, title, spans in found if spans]


def _document(name: str, title: str, spans: Sequence[Span], marks: Sequence[Mark]) -> dict[str, Any]:
    spans = spans[-_MOST_SPANS:]
    zero = min(span.begin_s for span in spans)
    end = max(span.end_s for span in spans)
    return {
        "id": f"timeline-{name}",
        "title": title,
        "zero_s": zero,
        "lanes": sorted({span.lane for span in spans}),
        "whats": list(dict.fromkeys(span.what for span in spans)),
        "bars": [
            [span.lane, round(span.begin_s - zero, 3), round(span.end_s - span.begin_s, 3), span.what, span.about]
            for span in spans
        ],
        "marks": [
            {"x": round(mark.time_s - zero, 3), "kind": mark.kind, "what": mark.what}
            for mark in marks
            if zero <= mark.time_s <= end
        ],
    }


def lane_of(engine: object) -> str:
    """Return ``engine 0`` for ``engine-0``."""
    return str(engine).replace("-", " ", 1)


def _seconds(value: object) -> str:
    return f"{value:.2f} s" if isinstance(value, int | float) else "unknown"
