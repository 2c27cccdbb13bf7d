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

_log = logging.getLogger(__name__)
_ASK_AGAIN_S = 1.0


def nodes_to_exclude(run: RunDir, plan: Plan, client: SlurmClient) -> list[str]:
    """Return the nodes that the next job of the run should avoid; none where Slurm cannot count the remaining ones.

    Nodes that other jobs occupy now count as remaining: they become free, and the run would wait for them anyway.
    """
    entries = read_exclusions(run, now_s=time.time())
    if not entries:
        return []
    try:
        nodes = client.nodes()
    except SlurmError as error:
        _log.warning("no nodes are excluded, because the number of remaining nodes is unknown: %s", error)
        return []
    needed: dict[str, int] = {}
    for component in plan.layout.components:
        needed[component.partition] = needed.get(component.partition, 0) + component.asked * component.jobs
    usable = {partition: [n.name for n in nodes if n.usable and partition in n.partitions] for partition in needed}
    known = {node.name for node in nodes}  # Slurm refuses a name that it does not know
    return choose_exclusions([e for e in entries if e.node in known], usable=usable, needed=needed)


def stay_away(plan: Plan, client: SlurmClient, job_id: int, nodes: Sequence[str], *, within_s: float) -> None:
    """Exclude nodes from a job of this run, which waits or is about to (`nodes_to_exclude`).

    Parameters
    ----------
    within_s:
        Maximum time in seconds. A job that keeps its nodes is logged and not an error: it may still succeed.
    """
    components = len(plan.layout.components) if plan.layout.kind == "hetjob" else 1
    if exclude_from_job(client, job_id, nodes, components=components, within_s=within_s) and nodes:
        _log.info("job %d excludes %s", job_id, ", ".join(nodes))


def exclude_from_job(
    client: SlurmClient, job_id: int, nodes: Sequence[str], *, components: int, within_s: float
) -> bool:
    """Set the excluded nodes of a job that was or is about to be requeued; return whether that was possible.

    Parameters
    ----------
    within_s:
        Maximum time in seconds: Slurm's own requeue after a node failure follows its signal a moment later.
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
