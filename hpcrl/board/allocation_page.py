"""The allocation of a run as a picture: nodes by roles, and the state of each replica there."""

from __future__ import annotations

import re
import time
from typing import Any

from hpcrl.board.board_state import Board, BoardAnswer, clock, view_stamp
from hpcrl.board.file_stamps import files_stamp
from hpcrl.board.run_page import run_head
from hpcrl.runs.exclusions import read_exclusions
from hpcrl.runs.fleet import FleetView, Replica, ReplicaState, read_fleet
from hpcrl.runs.observe import observe
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ComponentState, ComponentStatus
from hpcrl.runs.views.waiting import waiting_words

_KINDS: dict[str, str] = {
    ReplicaState.HEALTHY: "good",
    ComponentState.READY: "good",
    ReplicaState.SUSPECT: "bad",
    ReplicaState.DEAD: "bad",
    ComponentState.FAILED: "bad",
    ComponentState.LOST: "bad",
    ComponentState.EXITED: "ended",
    ComponentState.PENDING: "ended",
}
"""Looks of states; others change now (``busy``)."""
_HERE = "this machine"


def allocation_page(board: Board, key: str, run: RunDir, seen: str) -> BoardAnswer:
    """Return the picture of the newest attempt."""
    view = observe(run)
    fleet_path = [FleetView.path(run, view.attempt)] if view.attempt else []
    files = files_stamp([*fleet_path, run.path / "excluded_nodes.json"])
    fleet = read_fleet(run, view.attempt, view.components)
    states = [[each.role, each.replica, each.state.value, each.why] for each in fleet.replicas]
    tag = board.tag("nodes", key, view_stamp(view), files, states)
    if tag == seen:
        return BoardAnswer(None, tag)
    engines = {(each.role, each.replica): each for each in fleet.replicas}
    there = [component.role for component in view.components]
    roles = [
        role for role in dict.fromkeys([*(each.role.value for each in run.plan().groups), *there]) if role in there
    ]
    chips = [
        (component, _chip(component, engines.get((component.role, component.replica)))) for component in view.components
    ]
    nodes = sorted({node for component in view.components for node in _nodes(component)}, key=_natural)
    rows = [
        {
            "node": node,
            "cells": [
                [chip for component, chip in chips if component.role == role and node in _nodes(component)]
                for role in roles
            ],
        }
        for node in nodes
    ]
    counts = [
        {
            "role": role,
            "ready": sum(chip["kind"] == "good" for component, chip in chips if component.role == role),
            "replicas": sum(component.role == role for component, _ in chips),
        }
        for role in roles
    ]
    job = view.job
    waits = "" if job is None or not job.waiting else f"Slurm job {job.job_id} waits{waiting_words(view, job)}"
    excluded = [
        {"node": entry.node, "reason": entry.reason, "until": clock(entry.until_s)}
        for entry in read_exclusions(run, now_s=time.time())
    ]
    values: dict[str, Any] = {
        "roles": roles,
        "rows": rows,
        "counts": counts,
        "waits": waits,
        "spares": view.spare_nodes,
        "lost": view.lost_nodes,
        "excluded": excluded,
        "warnings": view.warnings,
        "title": f"{view.name} · allocation",
    }
    return board.render("nodes.html.j2", tag, of=[run], key=key, run=run_head(view), place="nodes", **values)


def _nodes(component: ComponentStatus) -> list[str]:
    return component.nodes or [_HERE if component.host in (None, "127.0.0.1", "localhost") else str(component.host)]


def _chip(component: ComponentStatus, replica: Replica | None) -> dict[str, str]:
    """Return what stands for a replica: the orchestrator's view of an engine, the supervisor's of other roles."""
    ended = component.state.ended or component.state is ComponentState.STOPPING
    judged = replica is not None and not ended
    state = replica.state if replica is not None and judged else component.state
    about = [f"{component.role} {component.replica}: {state.value.lower()}"]
    if replica is not None and judged:
        about += [replica.why] if replica.why else []
        if (engine := replica.view) is not None:
            about.append(f"version {engine.version}")
            about += [] if engine.running is None else [f"{engine.running} running"]
            about += [] if engine.waiting is None else [f"{engine.waiting} waiting"]
            about += [] if engine.kv_usage is None else [f"KV cache {engine.kv_usage:.0%}"]
            about += [] if engine.tokens_per_s is None else [f"{engine.tokens_per_s:,.0f} tokens/s"]
    if component.restarts:
        about.append(f"{component.restarts} restarts, the last after: {component.last_failure}")
    if component.progress:
        about.append(component.progress)
    return {
        "name": str(component.replica),
        "state": state.value.lower(),
        "kind": _KINDS.get(state, "busy"),
        "about": "; ".join(about),
    }


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Return a key by which ``n9`` is before ``n10``."""
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in re.split(r"(\d+)", name)]
