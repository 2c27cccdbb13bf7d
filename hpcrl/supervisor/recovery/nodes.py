"""Broken nodes: finds them by the logs of roles and by Slurm's states.

Slurm takes a list of excluded nodes only for jobs that wait. A job is one from the moment of its requeue on, also
while its last processes end, so the dying supervisor sets it as soon as it sees the node down
(`hpcrl.supervisor.recovery.node_faults`, `hpcrl.slurm.exclude`), and right after a requeue that it asked for itself.
If the supervisor was killed before it could (with its own node, or because Slurm did not wait), holders of replicas
on other nodes do it (`hpcrl.supervisor.elastic.holder`). If there are none, the next attempt finds out what was lost,
even if the node is up again, and requeues itself once if it began on such a node.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Sequence
from pathlib import Path

from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.plan import Plan
from hpcrl.runs.events import EventWriter
from hpcrl.runs.exclusions import exclude, read_exclusions
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunState, RunStatus
from hpcrl.slurm.client import SlurmClient
from hpcrl.slurm.errors import SlurmError

_log = logging.getLogger(__name__)
_TAIL_BYTES = 1 << 16
_OWN_WORD = frozenset({RunState.COMPLETED, RunState.CANCELLED, RunState.REQUEUED})
"""States whose cause is known. A FAILED attempt, in a job that Slurm requeues, may have seen less than Slurm."""

#: signs of broken hardware in a role's log; they exclude a node, so they must have no other meaning
_SIGNS = re.compile(
    rb"uncorrectable ECC error|ECC error encountered|GPU has fallen off the bus|NVRM: Xid"
    rb"|CUDA error: (?:hardware stack error|an uncorrectable)|no CUDA-capable device is detected"
    rb"|Failed to initialize NVML|\[Errno 5\] Input/output error"
    rb"|\[Errno 30\] Read-only file system|ibv_\w+ failed|NVLink error",
    re.IGNORECASE,
)


def hardware_trouble(logs: Sequence[Path]) -> dict[int, str]:
    """Return the indices of logs whose last lines report broken hardware, with the matched words."""
    found = {}
    for index, path in enumerate(logs):
        try:
            with path.open("rb") as stream:
                stream.seek(max(0, stream.seek(0, 2) - _TAIL_BYTES))
                tail = stream.read()
        except OSError:
            continue
        if match := _SIGNS.search(tail):
            found[index] = match[0].decode(errors="replace")
    return found


def find_lost_nodes(status: RunStatus | None, client: SlurmClient, job_id: int) -> dict[str, str]:
    """Return the nodes of an attempt that Slurm lost, with what happened to each; for the attempt after it.

    A node counts as lost if Slurm names it as failed (``FailedNode``, not in 22.05), if it is down now, or if its
    slurmd was started while the attempt ran: a node that came back at once was away. The result is empty if Slurm does
    not answer.

    Parameters
    ----------
    status:
        Last status of that attempt.
    job_id:
        Id of the job that Slurm has requeued.
    """
    if status is None or status.state in _OWN_WORD:
        return {}
    used = {node for component in status.components for node in component.nodes}
    try:
        nodes = client.nodes(used)
        named = {record.get("FailedNode") for record in client.details(job_id)}
    except SlurmError as error:
        _log.warning("Slurm does not say which nodes the attempt before has lost: %s", error)
        return {}
    lost = {}
    for node in nodes:
        since_s = node.daemon_since_s
        if node.down:
            lost[node.name] = "the node went down"
        elif node.name in named or (since_s is not None and since_s > status.started_at_s):
            lost[node.name] = "the node went down and came back"
    return lost


def record_lost_nodes(
    run: RunDir, plan: Plan, status: RunStatus | None, client: SlurmClient, job_id: int, *, writer: str
) -> None:
    """Record the nodes that the previous attempt lost (`find_lost_nodes`) but could not record itself.

    Parameters
    ----------
    writer:
        Writer that the events name.
    """
    seconds = plan.attempts.exclude_s
    if status is None or not seconds or not may_ask(run):
        return
    lost = find_lost_nodes(status, client, job_id)
    known = {entry.node for entry in read_exclusions(run, now_s=time.time()) if entry.attempt == status.attempt}
    fresh = {node: why for node, why in lost.items() if node not in known}
    if fresh:
        exclude(run, fresh, attempt=status.attempt, now_s=time.time(), seconds=seconds)
        events = EventWriter(run, attempt=status.attempt, writer=writer)
        events.emit("nodes.excluded", nodes=fresh)
        events.close()


def may_ask(run: RunDir) -> bool:
    """Return whether Slurm can be asked on nodes."""
    cluster = run.cluster()
    return isinstance(cluster, SlurmCluster) and cluster.capabilities.scontrol_on_nodes
