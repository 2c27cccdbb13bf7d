"""Comparison of a cluster profile with the running Slurm: findings with a code, a severity and a hint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.cluster_slurm import PartitionConfig
from hpcrl.sites.site_facts import PartitionFacts, SiteFacts

OLDEST = (22, 5)
"""Oldest Slurm that hpcrl was tried with."""


class Severity(StrEnum):
    """Consequence of a finding for a submit."""

    ERROR = "error"
    """Severity of a finding with which a job would be refused, wait without end, or fail."""
    WARNING = "warning"
    """A job may run, but not as the profile says."""
    NOTE = "note"
    """The site could do more than the profile uses."""


@dataclass(frozen=True)
class CheckFinding:
    """One difference.

    Attributes
    ----------
    code:
        Stable name of the kind of difference.
    key:
        Dotted key of the profile.
    what, hint:
        A sentence each.
    """

    code: str
    severity: Severity
    key: str
    what: str
    hint: str


def check_profile(cluster: SlurmCluster, facts: SiteFacts) -> list[CheckFinding]:
    """Compare a profile with facts; errors first."""
    found = [*_site(cluster, facts), *_capabilities(cluster, facts)]
    for name, partition in cluster.partitions.items():
        key = f"partitions.{name}"
        actual = facts.partition(name)
        if actual is None:
            known = ", ".join(p.name for p in facts.partitions) or "none"
            what = f"Slurm has no partition {name!r} that you may see (it has: {known})"
            found.append(CheckFinding("partition-missing", Severity.ERROR, key, what, "correct its name"))
            continue
        found += [*_partition(cluster, key, partition, actual), *_node(cluster, key, partition, actual)]
    order = list(Severity)
    return sorted(found, key=lambda finding: order.index(finding.severity))


def _site(cluster: SlurmCluster, facts: SiteFacts) -> Iterator[CheckFinding]:
    if facts.version < OLDEST:
        shown, oldest = (f"{major}.{minor:02d}" for major, minor in (facts.version, OLDEST))
        what = f"Slurm is {shown}; hpcrl was tried with {oldest} and later"
        yield CheckFinding("slurm-old", Severity.WARNING, "kind", what, "try the probe payload before a long run")
    if facts.preempts_unwarned:
        what = "jobs may be preempted without a signal before: a run continues from its checkpoint before that"
        hint = "ask for PreemptParameters=send_user_signal and a GraceTime longer than a save"
        yield CheckFinding("preempts-unwarned", Severity.NOTE, "kind", what, hint)
    if cluster.gres != "none" and not facts.has_gpus:
        what = "this Slurm does not give out GPUs (GresTypes has no gpu)"
        yield CheckFinding("gres-unknown", Severity.ERROR, "gres", what, "set gres: none")
    if cluster.gres == "none" and facts.has_gpus:
        what = "this Slurm gives out GPUs, and jobs that do not ask for them get none"
        yield CheckFinding("gres-not-asked", Severity.ERROR, "gres", what, "set gres: gres")


def _capabilities(cluster: SlurmCluster, facts: SiteFacts) -> Iterator[CheckFinding]:
    settings = {
        "hetjob": "SchedulerType is not sched/backfill",
        "requeue": "JobRequeue is 0",
        "accounting": "AccountingStorageType is not slurmdbd",
        "segment": "it needs Slurm 24.05 and topology/block",
    }
    for name, reason in settings.items():
        key, said, is_there = f"capabilities.{name}", getattr(cluster.capabilities, name), getattr(facts, name)
        if said and not is_there:
            # without accounting runs still work, with less information
            severity = Severity.WARNING if name == "accounting" else Severity.ERROR
            yield CheckFinding(f"no-{name}".replace("_", "-"), severity, key, reason, f"set {name}: false")
        if is_there and not said:
            what = "this Slurm can, but the profile says that it cannot"
            yield CheckFinding(f"unused-{name}".replace("_", "-"), Severity.NOTE, key, what, f"set {name}: true")


def _partition(
    cluster: SlurmCluster, key: str, partition: PartitionConfig, actual: PartitionFacts
) -> Iterator[CheckFinding]:
    if not actual.up:
        yield CheckFinding("partition-down", Severity.WARNING, key, "is not up: jobs wait", "ask the admins")
    if partition.nodes > actual.total:
        what = f"the profile says {partition.nodes}, Slurm has {actual.total}"
        yield CheckFinding("nodes-missing", Severity.ERROR, f"{key}.nodes", what, f"set nodes: {actual.total}")
    elif partition.nodes > actual.usable:
        what = f"{actual.total - actual.usable} of {actual.total} nodes are down or drained"
        hint = "`sinfo -R` says why; runs of all nodes wait for them"
        yield CheckFinding("nodes-down", Severity.WARNING, f"{key}.nodes", what, hint)
    limit = actual.max_time_h
    if limit is not None and (partition.max_time_h is None or partition.max_time_h > limit):
        shown = "none" if partition.max_time_h is None else f"{partition.max_time_h:g} h"
        what = f"the limit is {limit:g} h, the profile says {shown}"
        yield CheckFinding("time-limit", Severity.ERROR, f"{key}.max_time_h", what, f"set max_time_h: {limit:g}")
    for name, allowed in (("account", actual.accounts), ("qos", actual.qos)):
        value = getattr(partition, name)
        if value is not None and allowed and value not in allowed:
            what = f"{value!r} is not allowed there ({', '.join(allowed)})"
            yield CheckFinding(f"{name}-refused", Severity.ERROR, f"{key}.{name}", what, "choose one that is")
    if cluster.capabilities.exclusive and actual.shares_always:
        what = f"{actual.name} shares nodes always (OverSubscribe=FORCE)"
        yield CheckFinding("no-exclusive", Severity.ERROR, "capabilities.exclusive", what, "set exclusive: false")


def _node(
    cluster: SlurmCluster, key: str, partition: PartitionConfig, actual: PartitionFacts
) -> Iterator[CheckFinding]:
    node = partition.node
    if not actual.nodes:
        return
    fitting = sum(
        count
        for shape, count in actual.nodes
        if shape.gpus >= node.gpus and shape.cpus >= node.cpus and shape.memory_mib >= node.memory_gib * 1024 - 1
    )
    shape, count = actual.nodes[0]
    shown = f"{shape.gpus} GPUs, {shape.cpus} CPUs, {shape.memory_mib / 1024:.1f} GiB"
    if fitting == 0:
        what = f"no node is as large as the profile says; {count} have {shown}"
        yield CheckFinding("node-smaller", Severity.ERROR, f"{key}.node", what, "correct gpus, cpus and memory_gib")
    elif fitting < min(partition.nodes, actual.total):
        what = f"only {fitting} nodes are as large as the profile says; {count} have {shown}"
        hint = "set nodes to their number, and constraint to a feature that they have"
        yield CheckFinding("nodes-differ", Severity.WARNING, f"{key}.node", what, hint)
    if fitting and (shape.gpus > node.gpus or shape.cpus > node.cpus):
        what = f"nodes have more than the profile says: {shown}"
        yield CheckFinding("node-larger", Severity.NOTE, f"{key}.node", what, "correct gpus and cpus")
    types = {s.gpu_type for s, _ in actual.nodes if s.gpus}
    if cluster.gres != "none" and node.gpus and node.gpu_type is not None and node.gpu_type not in types:
        named = ", ".join(sorted(name for name in types if name)) or "no types"
        what = f"Slurm knows no GPU of type {node.gpu_type!r} there ({named})"
        hint = "set gpu_type as in `scontrol show node`, or remove it"
        yield CheckFinding("gpu-type", Severity.ERROR, f"{key}.node.gpu_type", what, hint)
