"""Broken nodes: finding them, writing them down, and keeping Slurm from giving them to the next attempt.

Slurm takes a list of excluded nodes only for jobs that wait. A job is one from the moment of its requeue on, also
while its last processes end, so the dying supervisor sets it as soon as it sees the node down
(`hpcrl.supervisor.blame`), and right after a requeue that it asked for itself. Where the supervisor was killed before
it could (with its own node, or by a Slurm that waits for nobody), the next attempt finds out what was lost, also where
the node is back already, and goes back into the queue once where it began on such a node.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Sequence
from pathlib import Path

from hpcrl.config.plan import Plan
from hpcrl.runs.exclusions import choose_exclusions, read_exclusions
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunState, RunStatus
from hpcrl.slurm.client import SlurmClient
from hpcrl.slurm.errors import SlurmError

__all__ = ["exclude_from_job", "find_lost_nodes", "hardware_trouble", "nodes_to_exclude", "stay_away"]

_log = logging.getLogger(__name__)
_TAIL_BYTES = 1 << 16
_ASK_AGAIN_S = 1.0
_OWN_WORD = frozenset({RunState.COMPLETED, RunState.CANCELLED, RunState.REQUEUED})
"""An attempt that ended so knew why. One that FAILED, in a job that Slurm requeues, may have seen less than Slurm."""

#: words by which broken hardware shows in a role's log; a node is avoided for these, so they must mean nothing else
_SIGNS = re.compile(
    rb"uncorrectable ECC error|ECC error encountered|GPU has fallen off the bus|NVRM: Xid"
    rb"|CUDA error: (?:hardware stack error|an uncorrectable)|no CUDA-capable device is detected"
    rb"|Failed to initialize NVML|\[Errno 5\] Input/output error"
    rb"|\[Errno 30\] Read-only file system|ibv_\w+ failed|NVLink error",
    re.IGNORECASE,
)


def hardware_trouble(logs: Sequence[Path]) -> dict[int, str]:
    """Indices of logs whose end tells of broken hardware, with the words."""
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


def nodes_to_exclude(run: RunDir, plan: Plan, client: SlurmClient) -> list[str]:
    """What the next job of the run should stay away from; nothing where Slurm cannot say what is left.

    Nodes that other jobs have now count as left: they come free, and the run would wait for them anyway.
    """
    entries = read_exclusions(run, now_s=time.time())
    if not entries:
        return []
    try:
        nodes = client.nodes()
    except SlurmError as error:
        _log.warning("no nodes are excluded, as Slurm does not say how many are left: %s", error)
        return []
    needed: dict[str, int] = {}
    for component in plan.layout.components:
        needed[component.partition] = needed.get(component.partition, 0) + component.nodes * component.jobs
    usable = {partition: [n.name for n in nodes if n.usable and partition in n.partitions] for partition in needed}
    known = {node.name for node in nodes}  # Slurm refuses a name that it does not know
    return choose_exclusions([e for e in entries if e.node in known], usable=usable, needed=needed)


def find_lost_nodes(status: RunStatus | None, client: SlurmClient, job_id: int) -> dict[str, str]:
    """Nodes of an attempt that Slurm lost, with what happened to each; for the attempt after it.

    A node is one of them where Slurm names it as the one that failed (``FailedNode``, not in 22.05), where it is down
    now, or where its slurmd was started while the attempt ran: who comes back at once was away. Nothing where Slurm
    does not answer.

    Parameters
    ----------
    status:
        The last of that attempt.
    job_id:
        Of the job that Slurm has requeued.
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


def stay_away(plan: Plan, client: SlurmClient, job_id: int, nodes: Sequence[str], *, within_s: float) -> None:
    """Let our job, which waits or is about to, stay away from nodes (`nodes_to_exclude`)."""
    components = len(plan.layout.components) if plan.layout.kind == "hetjob" else 1
    if exclude_from_job(client, job_id, nodes, components=components, within_s=within_s) and nodes:
        _log.info("job %d stays away from %s", job_id, ", ".join(nodes))


def exclude_from_job(
    client: SlurmClient, job_id: int, nodes: Sequence[str], *, components: int, within_s: float
) -> bool:
    """Set the excluded nodes of a job that was or is about to be requeued; whether that was possible.

    Parameters
    ----------
    within_s:
        How long to try: Slurm's own requeue after a node failure comes a moment after the signal to us.
    """
    if not nodes:
        return True
    deadline = time.monotonic() + within_s
    while True:
        try:
            client.exclude_nodes(job_id, nodes, components=components)
            return True
        except SlurmError as error:
            if time.monotonic() > deadline:
                _log.warning("job %d keeps its nodes %s: %s", job_id, ",".join(nodes), error)
                return False
        time.sleep(_ASK_AGAIN_S)
