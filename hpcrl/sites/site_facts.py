"""Facts about a site from its running Slurm, as far as a cluster profile needs them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from hpcrl.slurm.gres import gpus_by_type
from hpcrl.slurm.parse import parse_duration, parse_node


class SlurmFacts(Protocol):
    """Source of facts about Slurm; `hpcrl.slurm.client.SlurmClient` is one."""

    def config(self) -> dict[str, str]:
        """Return the settings of ``scontrol show config``."""

    def show(self, kind: str, name: str | None = None) -> list[dict[str, str]]:
        """Return the records of ``scontrol --oneliner show KIND``."""


@dataclass(frozen=True)
class Shape:
    """Shape of a node as Slurm is configured for it; ``gpu_type`` is None where it has none, or GPUs of several."""

    gpus: int
    gpu_type: str | None
    cpus: int
    memory_mib: int


@dataclass(frozen=True)
class PartitionFacts:
    """Partition of Slurm.

    Attributes
    ----------
    nodes:
        Nodes by shape, the most frequent shape first.
    usable:
        Nodes that could run a job now or later, as a submit counts them (`hpcrl.slurm.node_states`).
    max_time_h:
        None without a limit.
    accounts, qos:
        Allowed values; empty for all.
    shares_always:
        Jobs share nodes whatever they ask for (``OverSubscribe=FORCE``).
    """

    name: str
    up: bool
    is_default: bool
    nodes: tuple[tuple[Shape, int], ...]
    usable: int
    max_time_h: float | None
    accounts: tuple[str, ...]
    qos: tuple[str, ...]
    shares_always: bool

    @property
    def total(self) -> int:
        """Return the number of nodes of the partition."""
        return sum(count for _, count in self.nodes)


@dataclass(frozen=True)
class SiteFacts:
    """All that was found out."""

    cluster: str
    version: tuple[int, int]
    partitions: tuple[PartitionFacts, ...]
    has_gpus: bool
    hetjob: bool
    requeue: bool
    accounting: bool
    segment: bool
    preempts_unwarned: bool
    """Jobs may be preempted, and get no signal of theirs before (``PreemptParameters=send_user_signal``)."""

    def partition(self, name: str) -> PartitionFacts | None:
        """Return the partition of this name, or None."""
        return next((partition for partition in self.partitions if partition.name == name), None)


def read_site_facts(slurm: SlurmFacts) -> SiteFacts:
    """Ask a Slurm. Three commands, none of which costs the controller much."""
    config = slurm.config()
    nodes = [record for record in slurm.show("node") if "NodeName" in record]
    partitions = [record for record in slurm.show("partition") if "PartitionName" in record]
    version = _version(config.get("SLURM_VERSION", ""))
    # the older name of the parameter is still accepted
    preempt = f"{config.get('PreemptParameters', '')},{config.get('SlurmctldParameters', '')}"
    return SiteFacts(
        cluster=config.get("ClusterName", ""),
        version=version,
        partitions=tuple(_partition(record, nodes) for record in partitions),
        has_gpus="gpu" in config.get("GresTypes", "").split(","),
        hetjob=config.get("SchedulerType", "") == "sched/backfill",
        requeue=config.get("JobRequeue", "1") == "1",
        accounting=config.get("AccountingStorageType", "").endswith("slurmdbd"),
        segment=version >= (24, 5) and "block" in config.get("TopologyPlugin", ""),
        preempts_unwarned=config.get("PreemptType", "preempt/none") != "preempt/none"
        and "send_user_signal" not in preempt,
    )


def partitions_of_machine(slurm: SlurmFacts, names: Collection[str]) -> dict[str, str]:
    """Return the partitions that this machine is a node of, each with the node's name.

    Parameters
    ----------
    names:
        Names of the machine; ``NodeName`` or ``NodeHostName`` of a node must be one of them.
    """
    found: dict[str, str] = {}
    for node in slurm.show("node"):
        if {node.get("NodeName", ""), node.get("NodeHostName", "")} & (set(names) - {""}):
            found |= dict.fromkeys(_list(node.get("Partitions", "")), node["NodeName"])
    return found


def _partition(record: Mapping[str, str], nodes: list[dict[str, str]]) -> PartitionFacts:
    name = record["PartitionName"]
    mine = [node for node in nodes if name in node.get("Partitions", "").split(",")]
    shapes = Counter(_shape(node) for node in mine)
    return PartitionFacts(
        name=name,
        up=record.get("State", "UP") == "UP",
        is_default=record.get("Default", "NO") == "YES",
        nodes=tuple(shapes.most_common()),
        usable=sum(parse_node(node).usable for node in mine),
        max_time_h=_hours(record.get("MaxTime", "UNLIMITED")),
        accounts=_list(record.get("AllowAccounts", "ALL")),
        qos=_list(record.get("AllowQos", "ALL")),
        shares_always=record.get("OverSubscribe", "NO").startswith("FORCE"),
    )


def _shape(node: Mapping[str, str]) -> Shape:
    gpus = gpus_by_type(node.get("Gres", ""))
    # a request that names one of several types gets none of the others
    gpu_type = next(iter(gpus)) or None if len(gpus) == 1 else None
    return Shape(sum(gpus.values()), gpu_type, _number(node.get("CPUTot", "0")), _number(node.get("RealMemory", "0")))


def _number(text: str) -> int:
    match = re.fullmatch(r"([0-9]{1,18})[^0-9]*", text)
    return int(match[1]) if match else 0


def _list(text: str) -> tuple[str, ...]:
    return () if text in ("ALL", "", "(null)", "N/A") else tuple(text.split(","))


def _version(text: str) -> tuple[int, int]:
    match = re.match(r"([0-9]{1,9})\.([0-9]{1,9})", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _hours(text: str) -> float | None:
    seconds = parse_duration(text)
    return None if seconds is None else seconds / 3600
