"""Chooses the cause of an attempt's end from everything seen and reported, and the nodes it points to."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from hpcrl.runs.cause import Cause, CauseKind, choose_cause
from hpcrl.runs.clocks import Clocks
from hpcrl.runs.role import FailureRecord
from hpcrl.runs.rundir import RunDir
from hpcrl.supervisor.recovery.nodes import hardware_trouble
from hpcrl.supervisor.replicas.component import Component


def current_records(run: RunDir, attempt: int, components: Sequence[Component]) -> list[FailureRecord]:
    """Return the failure records of the current processes of roles, without non-critical replicas given up."""
    # failures that a restart has repaired, or that the run may survive, must not explain a later end
    since = {(c.role.value, c.replica): c.lives_since_s for c in components}
    spared = {(c.role.value, c.replica) for c in components if c.given_up and not c.group.policy.critical}
    keyed = [(record, (record.role, record.replica)) for record in FailureRecord.read_all(run, attempt)]
    return [record for record, key in keyed if key not in spared and record.time_s >= since.get(key, 0.0)]


def first_cause(
    ends: Sequence[Cause],
    records: Sequence[FailureRecord],
    components: Sequence[Component],
    *,
    stopped_at_s: float,
    clocks: Clocks,
) -> Cause | None:
    """Return the first error; None if nothing failed.

    Parameters
    ----------
    ends:
        Ends that the supervisor saw.
    records:
        Failure records of roles (`current_records`).
    stopped_at_s:
        Time at which the end was decided; failures that a role reports after it was asked to stop are ignored.
    clocks:
        Clocks of the nodes, by which times were corrected.
    """
    if not ends:
        return None
    limits = {(c.role.value, c.replica): c.stop_asked_at_s or stopped_at_s for c in components}

    def before_the_end(record: FailureRecord) -> bool:
        # clocks differ: a record counts if it may have been written before the stop
        limit_s = limits.get((record.role, record.replica), stopped_at_s)
        return record.time_s <= limit_s + clocks.compared(record.node, "").uncertain_s

    cause = choose_cause(ends, [record for record in records if before_the_end(record)], clocks)
    absent = [c for c in components if c.restarts.count and c.ready_at_s is None]
    if cause is not None and cause.secondary and absent:
        # a role that lost a peer reports only a consequence; an engine that is restarting then is the cause
        return min((c.restarts.first_error() for c in absent), key=lambda cause: cause.time_s)
    return cause


def slow_failures(records: Sequence[FailureRecord], components: Sequence[Component]) -> list[Cause]:
    """Return the failures of roles that reported one and have not ended since."""
    said = {(record.role, record.replica) for record in records}
    return [
        Cause(
            kind=CauseKind.EXIT,
            time_s=time.time(),
            message=f"{component.label} failed and did not end",
            role=component.role.value,
            replica=component.replica,
            secondary=True,
        )
        for component in components
        if (component.role.value, component.replica) in said and component.end is None
    ]


def broken_nodes(component: Component, cause: Cause, logs: Sequence[str]) -> dict[str, str]:
    """Return the nodes on which a replica failed as on broken hardware, with the words of its log.

    Parameters
    ----------
    logs:
        Files of its tasks, in the order of its nodes.
    """
    nodes = component.address.nodes
    if cause.kind in (CauseKind.CANCELLED, CauseKind.NODE_FAIL) or not nodes:
        return {}
    per_node = max(1, len(logs) // len(nodes))
    found = hardware_trouble([Path(log) for log in logs])
    return {nodes[index // per_node]: f"{component.label}: {words}" for index, words in found.items()}
