"""Table of the engines of a run, for ``hpcrl status``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hpcrl.runs.fleet import EngineView, Fleet, FleetView, Replica, ReplicaState

_STYLES = {
    ReplicaState.HEALTHY: "green",
    ReplicaState.STARTING: "yellow",
    ReplicaState.RESTARTING: "yellow",
    ReplicaState.STALE: "yellow",
    ReplicaState.SUSPECT: "bold red",
    ReplicaState.DEAD: "bold red",
    ReplicaState.UNKNOWN: "dim",
}
_WIDE = 110
"""Minimum width in columns for all columns and for an engine's problem in its row; it is below the row otherwise."""
_COLUMNS = ("engine", "health", "version", "in flight", "running", "waiting", "KV", "prefix hits", "tokens/s", "")
_LEFT_OUT = ("prefix hits", "")
_WORKERS = 8
"""Maximum number of workers of environments with a line of their own."""


def fleet_table(fleet: Fleet, *, width: int = 120, most: int | None = None) -> RenderableType:
    """Return a table with a line for the fleet, and one for each engine; ``?`` stands for an unknown value.

    Parameters
    ----------
    width:
        Available columns.
    most:
        Maximum number of engines to show, unhealthy ones first; all by default.
    """
    wide = width >= _WIDE
    shown = [i for i, column in enumerate(_COLUMNS) if wide or column not in _LEFT_OUT]
    table = Table(box=None, header_style="dim", pad_edge=False)
    for i in shown:
        # names and figures must not wrap, and they fit their columns
        last = not _COLUMNS[i]
        table.add_column(_COLUMNS[i], justify="left" if i < 2 or last else "right", no_wrap=not last)
    replicas = fleet.replicas
    if most is not None and len(replicas) > most:
        replicas = sorted(replicas, key=lambda replica: replica.state is ReplicaState.HEALTHY)[:most]
    for replica in replicas:
        row = _row(replica)
        table.add_row(*(row[i] for i in shown))
    parts: list[RenderableType] = [_head(fleet.view), *([table] if replicas else [])]
    parts += _worker_lines(fleet.view)
    if not wide:
        parts += [Text(f"{replica.role} {replica.replica}: {why}") for replica in replicas if (why := _why(replica))]
    if hidden := len(fleet.replicas) - len(replicas):
        kinds = Counter(replica.state.value for replica in fleet.replicas if replica not in replicas)
        what = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        parts.append(Text(f"and {hidden} more: {what}", style="dim"))
    return Group(*parts)


def _head(view: FleetView | None) -> Text:
    if view is None:
        return Text("engines: the orchestrator does not report them now", style="dim")
    text = Text(f"engines: {view.in_flight} rollouts in flight, at most {view.limit}")
    if view.newest is not None:
        text.append(f"; newest version {view.newest}")
        if view.durable is not None and view.durable < view.newest:
            text.append(f", which is not durable; version {view.durable} is" if view.durable >= 0 else "")
    if view.router is not None:
        text.append("; the router answers" if view.router else "; the router does not answer")
    if view.weights is not None:
        text.append(f"; {_ways(view.weights)}")
    return text


def _ways(weights: Mapping[str, float]) -> str:
    """Return by which way weights came."""
    names = {"fabric_bytes": "over the fabric", "node_bytes": "from other nodes", "share_bytes": "from the share"}
    read = [f"{weights.get(name, 0.0) / 1e9:.3g} GB {way}" for name, way in names.items() if weights.get(name)]
    failed = round(weights.get("fabric_failures", 0.0))
    return f"weights: {', '.join(read) or 'none read yet'}" + (f", {failed} pulls failed" if failed else "")


def _worker_lines(view: FleetView | None) -> list[Text]:
    """Return lines about workers of environments: all of them together, and each that is away or was lost."""
    if view is None or not view.workers:
        return []
    there = [worker for worker in view.workers if worker.up]
    calls = [worker.calls for worker in there]
    text = f"workers of environments: {len(there)} of {len(view.workers)} are there"
    if calls:
        each = f"{calls[0]}" if len(calls) == 1 else f"{min(calls)} to {max(calls)} each"
        text += f", with {sum(calls)} rollouts and prompts ({each})"
    lines = [Text(text, style="" if len(there) == len(view.workers) else "yellow")]
    troubled = [worker for worker in view.workers if worker.losses or not worker.up]
    for worker in troubled[:_WORKERS]:
        state = f"there, with {worker.calls}" if worker.up else "away"
        lines.append(Text(f"  worker {worker.replica}: {state}; lost {worker.losses} time{'s' * (worker.losses != 1)}"))
    if len(troubled) > _WORKERS:
        lines.append(Text(f"  and {len(troubled) - _WORKERS} more that were lost", style="dim"))
    return lines


def _row(replica: Replica) -> list[str | Text]:
    # a dead replica does nothing, whatever its last measurements were
    view = None if replica.state is ReplicaState.DEAD else replica.view
    state = Text(replica.state.value, style=_STYLES[replica.state])
    name = f"{replica.role} {replica.replica}"
    if view is None:
        unknown = "-" if replica.state is ReplicaState.DEAD else "?"
        return [name, state, *[unknown] * 7, Text(_why(replica), overflow="fold")]
    return [
        name,
        state,
        _version(view),
        f"{view.in_flight}{'' if view.window is None else f' of {view.window:.0f}'}",
        _number(view.running),
        _number(view.waiting),
        _share(view.kv_usage),
        _share(view.prefix_hit_rate),
        "?" if view.tokens_per_s is None else f"{view.tokens_per_s:,.0f}",
        Text(_why(replica), overflow="fold"),
    ]


def _why(replica: Replica) -> str:
    outside = replica.view is not None and replica.view.routed is False
    return replica.why or ("not in the router" if outside else "")


def _version(view: EngineView) -> str:
    now = "none" if view.version < 0 else str(view.version)
    return now if view.loading is None else f"{now} > {view.loading}"


def _number(value: int | None) -> str:
    return "?" if value is None else str(value)


def _share(value: float | None) -> str:
    return "?" if value is None else f"{value:.0%}"


def fleet_document(fleet: Fleet) -> dict[str, Any]:
    """Return the fleet as a JSON document; null stands for an unknown value."""
    view = fleet.view
    return {
        "time_s": None if view is None else view.time_s,
        "newest": None if view is None else view.newest,
        "durable": None if view is None else view.durable,
        "in_flight": None if view is None else view.in_flight,
        "limit": None if view is None else view.limit,
        "router_answers": None if view is None else view.router,
        "workers": [] if view is None else msgspec.to_builtins(view.workers),
        "replicas": [
            {
                "role": replica.role,
                "replica": replica.replica,
                "state": replica.state.value,
                "why": replica.why,
                **_facts(None if replica.state is ReplicaState.DEAD else replica.view),
            }
            for replica in fleet.replicas
        ],
    }


def _facts(view: EngineView | None) -> dict[str, Any]:
    names = [name for name in EngineView.__struct_fields__ if name not in ("role", "replica", "why")]
    return dict.fromkeys(names) if view is None else {n: msgspec.to_builtins(getattr(view, n)) for n in names}
