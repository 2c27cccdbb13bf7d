"""Events for people: those that say all that is shown of them."""

from __future__ import annotations

from hpcrl.runs.events import Event, read_events
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunState

_NEEDED: dict[str, dict[str, type | tuple[type, ...]]] = {
    "replica.lost": {"why": str},
    "replica.submitted": {"job_id": (int, str), "lost": str},
    "trainer.step_skipped": {"what": str},
    "trainer.checkpoint_skipped": {"step": int, "reason": str},
    "trainer.checkpoints_put_aside": {"steps": list, "asked": str},
    "trainer.versions_withdrawn": {"versions": list},
    "attempt.changed": {"changes": list},
    "component.restarting": {"role": str, "replica": int, "cause": str, "restart": int},
    "component.lost": {"cause": str},
    "component.hung": {"role": str, "replica": int, "dumps": list, "frames": list},
    "component.went_on": {"role": str, "replica": int, "problem": str},
    "engine.fabric_failed": {"engine": str, "version": int, "why": str},
    "trainer.fabric_failed": {"version": int, "why": str},
    "trainer.version_refused": {"what": str},
    "engine.adapter_unproven": {"engine": str, "tries": int},
    "engine.weights_unproved": {"engine": str, "version": int, "why": str},
    "notify.failed": {"notifier": str, "error": str},
    "run.state": {"state": str},
    "store.canary": {"host": str},
    "store.segment_lost": {"segment": str, "segments": int},
    "nodes.excluded": {"nodes": (list, dict)},
}
"""Required fields of an event: one of another form, from a damaged line or another version, is left out."""


def whole_events(run: RunDir, *, kind: str, attempt: int | None = None) -> list[Event]:
    """Read the events of a kind that say all that is shown of them."""
    needed = _NEEDED[kind]
    return [
        event
        for event in read_events(run, attempt=attempt, kind=kind)
        if all(isinstance(event.data.get(name), kinds) for name, kinds in needed.items())
        and (kind != "run.state" or event.data["state"] in RunState.__members__)
    ]
