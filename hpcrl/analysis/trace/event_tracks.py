"""Tracks of a trace that come from events: updates of engines, hand-offs, checkpoints, evaluations, states, faults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpcrl.analysis.trace.trace_writer import TraceWriter
from hpcrl.runs.events import Event

_FAULTS = frozenset(
    {
        *("component.restarting", "component.lost", "component.hung", "component.went_on", "attempt.retried"),
        *(
            "replica.lost",
            "replica.refused",
            "nodes.excluded",
            "nodes.replaced",
            "supervisor.warned",
            "supervisor.orphans",
        ),
        *("engine.away", "engine.back", "engine.wrong_weights", "engine.version_skipped", "engine.read_timed_out"),
        *("router.away", "router.back", "store.segment_lost", "environment.lost", "rollouts.failing"),
        *("trainer.step_skipped", "trainer.version_refused", "trainer.checkpoint_failed", "trainer.restored"),
        *(
            "trainer.checkpoint_skipped",
            "run.space_low",
            "run.space_gone",
            "rollouts.limit_cut",
            "guard.supervisor_lost",
        ),
        *("evaluation.none_finished", "run.state", "attempt.started", "sink.failed", "reports.caught_up"),
    }
)
"""Events that are instants: faults, restarts and changes of the run's state."""
_ENDS = frozenset({"EXITED", "FAILED", "LOST", "COMPLETED"})
_MOST_TEXT = 200
"""Maximum characters of a text of an instant."""


def add_events(writer: TraceWriter, events: Sequence[Event], *, begin_s: float, end_s: float) -> None:
    """Add everything that events say and that ends between two times (seconds since the epoch)."""
    within = [event for event in events if begin_s <= event.time_s <= end_s]
    published: dict[tuple[int, object], Event] = {}
    for event in within:
        data = event.data
        match event.kind:
            case "engine.weights_updated":
                _update(writer, event)
            case "trainer.version_published":
                published[event.attempt, data.get("version")] = event
                writer.instant("trainer", "hand-off", f"v{data.get('version')} published", event.time_s, **_texts(data))
            case "trainer.version_announced":
                writer.instant("trainer", "hand-off", f"v{data.get('version')} announced", event.time_s, **_texts(data))
            case "trainer.checkpoint_saved":
                seconds = _number(data.get("seconds"))
                writer.slice(
                    "trainer",
                    "checkpoints",
                    f"save step {data.get('step')}",
                    event.time_s - seconds,
                    event.time_s,
                    **_texts(data),
                )
            case "evaluation" | "evaluation.set" | "evaluation.asked":
                _evaluation(writer, event)
            case kind if kind in _FAULTS:
                words = data.get("state", "") if kind == "run.state" else ""
                name = f"{kind} {words}".strip()
                writer.instant(_process_of(event), "faults and states", name, event.time_s, **_texts(data))
    _states(writer, within)


def _update(writer: TraceWriter, event: Event) -> None:
    """Add the update of an engine, and the end of it in which the engine stood still."""
    engine, version = str(event.data.get("engine", event.writer)), event.data.get("version")
    seconds, pause_s = _number(event.data.get("seconds")), _number(event.data.get("pause_s"))
    begin_s = event.time_s - seconds
    writer.slice(engine, "weight updates", f"load v{version}", begin_s, event.time_s, **_texts(event.data))
    writer.slice(engine, "weight updates", "frozen", max(begin_s, event.time_s - pause_s), event.time_s)
    writer.instant(engine, "weight updates", f"serves v{version}", event.time_s, version=version)


def _evaluation(writer: TraceWriter, event: Event) -> None:
    data = event.data
    name = f"evaluate v{data.get('version')}" + (f" {data['set']}" if "set" in data else "")
    kept = {key: data[key] for key in ("reward", "prompts", "counted", "failed") if key in data}
    seconds = _number(data.get("seconds"))
    thread = f"evaluation {data['set']}" if "set" in data else "evaluation"
    if seconds:
        writer.slice("orchestrator", thread, name, event.time_s - seconds, event.time_s, **kept)
    else:
        writer.instant("orchestrator", thread, name, event.time_s, **kept)


def _states(writer: TraceWriter, events: Sequence[Event]) -> None:
    """Add the states of each replica until the next one, a thread each."""
    since: dict[str, tuple[float, str]] = {}
    newest = max((event.time_s for event in events), default=0.0)
    for event in events:
        if event.kind != "component.state" or "state" not in event.data:
            continue
        who = f"{event.data.get('role')} {event.data.get('replica')}"
        _close(writer, who, since.pop(who, None), event.time_s)
        if event.data["state"] not in _ENDS:
            since[who] = event.time_s, str(event.data["state"])
    for who, state in since.items():
        _close(writer, who, state, newest)


def _close(writer: TraceWriter, who: str, state: tuple[float, str] | None, end_s: float) -> None:
    if state is not None:
        writer.slice("supervisor", who, state[1], state[0], end_s)


def _process_of(event: Event) -> str:
    """Return the process of the role that an event is about, else of its writer."""
    engine = event.data.get("engine")
    if isinstance(engine, str):
        return engine
    role, replica = event.data.get("role"), event.data.get("replica")
    if isinstance(role, str):
        return f"{role}-{replica}" if role not in ("trainer", "orchestrator") else role
    written = event.writer.removeprefix("guard-")
    return written.removesuffix("-0") if written.startswith(("trainer", "orchestrator")) else written


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and value > 0 else 0.0


def _texts(data: dict[str, Any]) -> dict[str, Any]:
    """Return the details of an event without what is long."""
    found: dict[str, Any] = {}
    for name, value in data.items():
        if isinstance(value, str):
            found[name] = value[:_MOST_TEXT]
        elif isinstance(value, bool | int | float) or value is None:
            found[name] = value
    return found
