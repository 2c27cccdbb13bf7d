"""Keeping Slurm from giving nodes to the jobs of a run.

Slurm takes a list of excluded nodes only for jobs that wait. A job is one from the moment of its requeue on, also
while its last processes end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from hpcrl.config.plan import Plan
from hpcrl.runs.exclusions import choose_exclusions, read_exclusions
from hpcrl.runs.rundir import RunDir
from hpcrl.slurm.client import SlurmClient
from hpcrl.slurm.errors import SlurmError

__all__ = ["exclude_from_job", "nodes_to_exclude", "stay_away"]

_log = logging.getLogger(__name__)
_ASK_AGAIN_S = 1.0


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


def stay_away(plan: Plan, client: SlurmClient, job_id: int, nodes: Sequence[str], *, within_s: float) -> None:
    """Let our job, which waits or is about to, stay away from nodes (`nodes_to_exclude`).

    Parameters
    ----------
    within_s:
        How long to try. A job that keeps its nodes then is a line in the log and no error: it may still do its work.
    """
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
