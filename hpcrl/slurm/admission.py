"""Check that Slurm could start the jobs of a plan, before anything is submitted or written.

``sbatch --test-only`` reports what Slurm would reject. Jobs that it accepts and never starts are detected here:
components of one job that together need more nodes than a partition has, and jobs beyond the limits of a partition.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.plan import Plan
from hpcrl.errors import UsageError
from hpcrl.slurm.client import SlurmClient
from hpcrl.slurm.errors import SlurmRejectedError
from hpcrl.slurm.parse import parse_duration
from hpcrl.slurm.records import Node
from hpcrl.slurm.render import ScriptPart, planned_parts
from hpcrl.slurm.scripts import STAND_IN_ID, run_scripts

_NAMED_NODES = 4


class NodeNeed(NamedTuple):
    """Nodes that a run needs at once in one partition to begin."""

    partition: str
    nodes: int


def check_admission(plan: Plan, cluster: SlurmCluster, client: SlurmClient) -> None:
    """Refuse a run whose jobs Slurm would reject, or accept and never start.

    Raises
    ------
    UsageError
        With each reason. Nothing was submitted or written.
    hpcrl.slurm.errors.SlurmError
        Slurm cannot be asked.
    """
    found = obstacles(plan, cluster, client)
    if found:
        raise UsageError(
            "Slurm could not start this run now; nothing was submitted\n"
            + "".join(f"  {reason}\n" for reason in found)
            + "    hint: ask for less, or for another partition: `hpcrl plan` shows the nodes of each role\n"
            "    hint: submit it anyway, and wait until nodes or limits have changed: --queue-anyway"
        )


def obstacles(plan: Plan, cluster: SlurmCluster, client: SlurmClient) -> list[str]:
    """Return why the jobs of a plan could not start, a sentence each; empty where no obstacle is known.

    Raises
    ------
    hpcrl.slurm.errors.SlurmError
        Slurm does not answer.
    """
    needs, nodes = needed_nodes(plan), client.nodes()
    found = [reason for need in needs if (reason := _shortage(need, nodes))]
    for partition in dict.fromkeys(component.partition for component in plan.layout.components):
        found += _limits(plan, partition, client)
    if not found:
        found = _refusals(plan, cluster, client)
    return found


def needed_nodes(plan: Plan) -> list[NodeNeed]:
    """Return the nodes that must be free at once: all components, or the minimum of elastic replicas.

    Components that share nodes with others (not ``exclusive``) count once.
    """
    totals: dict[str, int] = {}
    for index, component in enumerate(plan.layout.components):
        jobs = component.jobs
        if plan.layout.kind == "elastic" and index > 0:
            jobs = min(jobs, plan.elastic.min_replicas)
        nodes, before = component.asked * jobs, totals.get(component.partition, 0)
        totals[component.partition] = before + nodes if component.exclusive else max(before, nodes)
    return [NodeNeed(partition, nodes) for partition, nodes in totals.items()]


def _shortage(need: NodeNeed, nodes: Sequence[Node]) -> str:
    mine = [node for node in nodes if need.partition in node.partitions]
    usable = [node for node in mine if node.usable]
    if not mine or need.nodes <= len(usable):
        return ""  # Slurm itself reports a missing partition
    what = f"the run needs {need.nodes} nodes of partition {need.partition} at once, which has {len(mine)}"
    if need.nodes > len(mine):
        return what
    away = [f"{node.name} {'+'.join(sorted(node.states))}{_because(node)}" for node in mine if not node.usable]
    more = f" and {len(away) - _NAMED_NODES} more" if len(away) > _NAMED_NODES else ""
    return f"{what}, {len(usable)} of them usable ({', '.join(away[:_NAMED_NODES])}{more})"


def _because(node: Node) -> str:
    # user and time follow in brackets
    return f": {node.reason.partition(' [')[0]}" if node.reason else ""


def _limits(plan: Plan, partition: str, client: SlurmClient) -> list[str]:
    """Return the limits of a partition with which a job would wait forever, because the site does not reject it."""
    try:
        records = client.show("partition", partition)
    except SlurmRejectedError:
        return []  # sbatch reports that it does not exist
    record: Mapping[str, str] = next((r for r in records if r.get("PartitionName") == partition), {})
    found = []
    longest = parse_duration(record.get("MaxTime", "UNLIMITED"))
    if longest is not None and plan.time_limit_s > longest:
        asked = f"{plan.time_limit_s / 3600:g} h (job.time_limit_h, else the profile's limits.time_limit_h)"
        found.append(f"the run asks for {asked}, and partition {partition} gives {longest / 3600:g} h (MaxTime)")
    most = record.get("MaxNodes", "UNLIMITED")
    largest = max(each.nodes for each in plan.layout.components if each.partition == partition)
    if most.isdecimal() and largest > int(most):
        found.append(f"a job of the run needs {largest} nodes, and partition {partition} gives a job {most} (MaxNodes)")
    if record.get("State", "UP") != "UP":
        found.append(f"partition {partition} is {record['State']}")
    return found


def _refusals(plan: Plan, cluster: SlurmCluster, client: SlurmClient) -> list[str]:
    """Return the objections of ``sbatch --test-only`` to each kind of job of the plan."""
    parts: dict[tuple[int, ...], ScriptPart] = {}
    for part in planned_parts(plan):
        parts.setdefault(part.components, part)  # replicas of a role are alike
    found = []
    with tempfile.TemporaryDirectory(prefix="hpcrl-test-only-") as directory:
        for script in run_scripts(plan, cluster, run_id=STAND_IN_ID, parts=list(parts.values())):
            path = Path(directory) / script.file_name
            path.write_text(script.text)
            try:
                client.test_only(path)
            except SlurmRejectedError as error:
                found.append(f"Slurm refuses job {script.part}: {_words(error)}")
    return found


def _words(error: SlurmRejectedError) -> str:
    """Return the message of sbatch, without the command line."""
    said = str(error).rpartition("): ")[2].splitlines()
    return "; ".join(line.removeprefix("sbatch: error: ").removeprefix("allocation failure: ") for line in said)
