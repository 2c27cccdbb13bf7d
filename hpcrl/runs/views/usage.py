"""GPU-hours of a run: what its attempts held, whether they used it or not; and the whole status as a document."""

from __future__ import annotations

import time

import msgspec

from hpcrl.config.plan import Plan
from hpcrl.runs.events import Event
from hpcrl.runs.fleet import read_fleet
from hpcrl.runs.observe import RunView, observe
from hpcrl.runs.run_progress import read_progress
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunState
from hpcrl.runs.views.failures import failure_warnings
from hpcrl.runs.views.fleet_table import fleet_document
from hpcrl.runs.views.late_sinks import sink_warnings
from hpcrl.runs.views.unsent_notices import notice_warnings
from hpcrl.storage.msgspec_types import prepared

STATUS_SCHEMA = "hpcrl.status/1"
_TAIL_BYTES = 65536
_HOLDING = frozenset({RunState.STARTING, RunState.RUNNING, RunState.STOPPING})


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Resources that a run has held so far, all attempts together.

    Attributes
    ----------
    wall_h:
        Hours from the first to the last event of each supervisor, without the time in the queue.
    gpu_hours:
        ``wall_h`` times the GPUs of the allocation. 0 for a run without GPUs.
    gpu_hours_by_role:
        The same by the roles that share a component's nodes (``trainer``; ``prefill+decode``).
    """

    wall_h: float
    gpu_hours: float
    gpu_hours_by_role: dict[str, float]


def read_usage(run: RunDir, view: RunView, *, now_s: float | None = None) -> Usage:
    """Return the hours held by a run, from the times in its supervisors' event files.

    Jobs of the layout ``elastic`` that came later or left earlier are counted as if they had been there all the time.
    """
    spans = attempt_spans(run, view, now_s=now_s).values()
    hours = sum(max(0.0, end_s - begin_s) for begin_s, end_s in spans) / 3600.0
    return Usage(wall_h=hours, gpu_hours=hours * run.plan().layout.gpus, gpu_hours_by_role=_by_role(run.plan(), hours))


def attempt_spans(run: RunDir, view: RunView, *, now_s: float | None = None) -> dict[int, tuple[float, float]]:
    """Return from when to when each attempt has held its nodes, in seconds since the epoch, without the queue.

    An attempt begins with the first event of its supervisor and ends with the last one; the newest may hold nodes since
    then. Attempts whose supervisor recorded nothing are left out.

    Parameters
    ----------
    now_s:
        The current time by default.
    """
    found = {number: span for number in run.attempts() if (span := recorded_span(run, number)) is not None}
    if view.attempt in found:
        begin_s, last_s = found[view.attempt]
        now_s = time.time() if now_s is None else now_s
        found[view.attempt] = begin_s, max(last_s, now_s if _holds(view) else view.heartbeat_s or 0.0)
    return found


def _holds(view: RunView) -> bool:
    """Return whether the newest attempt holds nodes now, by Slurm's answer where there is one.

    An attempt that waits in the queue holds none.
    """
    return view.state in _HOLDING and (view.job is None or view.job.holding)


def _by_role(plan: Plan, hours: float) -> dict[str, float]:
    shares: dict[str, float] = {}
    for component in plan.layout.components:
        gpus = component.asked * component.jobs * component.gpus_per_node
        if gpus:
            name = "+".join(component.roles)
            shares[name] = shares.get(name, 0.0) + hours * gpus
    return shares


def recorded_span(run: RunDir, attempt: int) -> tuple[float, float] | None:
    """Return the times of the first and the last event of the attempt's supervisor; read only the ends of the file."""
    path = run.events_dir / f"{attempt:04d}-supervisor.jsonl"
    try:
        with path.open("rb") as stream:
            head = stream.readline()
            size = stream.seek(0, 2)
            stream.seek(max(0, size - _TAIL_BYTES))
            tail = stream.read().splitlines()
    except FileNotFoundError:
        return None
    first = _time_s(head)
    last = next((t for t in map(_time_s, reversed(tail)) if t is not None), None)
    return None if first is None or last is None else (first, last)


def _time_s(line: bytes) -> float | None:
    try:
        return msgspec.json.decode(line, type=prepared(Event)).time_s
    except msgspec.DecodeError:  # the torn line of a supervisor that was killed
        return None


def status_document(run: RunDir) -> str:
    """Return state, progress and usage as JSON (schema `STATUS_SCHEMA`)."""
    view, progress = observe(run), read_progress(run)
    if not view.state.ended and view.state is not RunState.RUNNING:  # the pace of before tells nothing
        progress = msgspec.structs.replace(progress, eta_s=None)
    document = {
        "schema": STATUS_SCHEMA,
        **msgspec.to_builtins(view),
        "warnings": [
            *view.warnings,
            *failure_warnings(progress.rollouts).values(),
            *notice_warnings(run),
            *sink_warnings(run),
        ],
        "progress": msgspec.to_builtins(progress),
        "usage": msgspec.to_builtins(read_usage(run, view)),
        "fleet": fleet_document(read_fleet(run, view.attempt, view.components)),
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()
