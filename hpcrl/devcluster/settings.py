"""Settings of a virtual cluster, and the record of one that was made."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from hpcrl.errors import UsageError

#: Slurm takes names of clusters, nodes, partitions and GPU types apart at other signs
_NAME = re.compile(r"[a-z][a-z0-9]{0,30}")
_ADDRESSES_A_PORT = 250
"""Loopback addresses that one port number stands for; see `Record.nodes`."""

_LEAST_CRED_EXPIRE_S = 5


class ClusterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of a virtual cluster. Sizes are what Slurm believes; the machine may be much smaller.

    The defaults are those of the packaged cluster profile ``devcluster``.

    Attributes
    ----------
    name:
        Name of the cluster, and the first part of its nodes' names: lower-case letters and digits.
    nodes, gpus, cpus, sockets, memory_mib:
        Number of nodes, and what each of them has.
    gpu_type:
        Type of the GPUs in ``--gres=gpu:TYPE:N``.
    partition, urgent_partition:
        The default partition, and one whose jobs preempt those of the first: they are requeued.
    accounting:
        With slurmdbd and MariaDB.
    stale_s:
        Each node sees ``shared/`` with attributes and names cached for this many seconds, as over NFS; None: as it
        is.
    requeue_delay_s:
        A requeued job waits this long at least; 5 or more (Slurm takes its default of 2 minutes for less).
    grace_s:
        Between the signal of a preemption and its kill.
    kill_wait_s:
        Between SIGTERM and SIGKILL of a cancelled job.
    node_timeout_s:
        A node that does not answer for this long is down.
    min_job_age_s:
        The controller remembers ended jobs for this long.
    """

    name: str = "dev"
    nodes: int = 28
    gpus: int = 8
    gpu_type: str = "h200"
    cpus: int = 8
    sockets: int = 2
    memory_mib: int = 2000
    partition: str = "gpu"
    urgent_partition: str = "urgent"
    accounting: bool = False
    stale_s: float | None = None
    requeue_delay_s: int = 5
    grace_s: int = 5
    kill_wait_s: int = 5
    node_timeout_s: int = 30
    min_job_age_s: int = 600

    def check(self) -> None:
        """Raise `hpcrl.errors.UsageError` for values that Slurm would not take."""
        for what in ("name", "gpu_type", "partition", "urgent_partition"):
            if not _NAME.fullmatch(getattr(self, what)):
                raise UsageError(
                    f"{what.replace('_', ' ')} {getattr(self, what)!r} is not a name for Slurm\n"
                    "    hint: a lower-case letter, then up to 30 lower-case letters and digits"
                )
        if not 1 <= self.nodes <= 2000:
            raise UsageError(f"{self.nodes} nodes: a virtual cluster has 1 to 2000")
        if self.gpus < 0 or self.gpus > 64:
            raise UsageError(f"{self.gpus} GPUs: a node has 0 to 64")
        if self.cpus < 1 or self.cpus % self.sockets:
            raise UsageError(f"{self.cpus} cores: the number must be a multiple of the {self.sockets} sockets")
        if self.requeue_delay_s < _LEAST_CRED_EXPIRE_S:
            raise UsageError(
                f"a requeue delay of {self.requeue_delay_s} s: Slurm takes {_LEAST_CRED_EXPIRE_S} s or more"
            )
        if self.stale_s is not None and self.stale_s < 0:
            raise UsageError(f"--stale-s {self.stale_s:g} is negative")


class Ports(msgspec.Struct, frozen=True):
    """TCP ports of a cluster; ``database`` is 0 without accounting. Node i has ``first_node + i``."""

    controller: int
    database: int
    first_node: int


class VirtualNode(msgspec.Struct, frozen=True):
    """One node: its slurmd listens on ``port``; ``address`` is a loopback address of its own."""

    name: str
    address: str
    port: int


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """``cluster.json``: what was made."""

    format_version: int = 1
    settings: ClusterSettings
    ports: Ports
    slurm_version: tuple[int, int]
    created_s: float

    @property
    def nodes(self) -> tuple[VirtualNode, ...]:
        """Return all nodes, in order."""
        return tuple(self._nodes())

    def node(self, name: str) -> VirtualNode:
        """Return the node of this name (UsageError where there is none)."""
        for node in self._nodes():
            if node.name == name:
                return node
        first, last = self.nodes[0].name, self.nodes[-1].name
        raise UsageError(f"cluster {self.settings.name} has no node {name!r}\n    hint: {first} to {last}")

    def _nodes(self) -> Iterator[VirtualNode]:
        digits = max(3, len(str(self.settings.nodes)))
        for i in range(self.settings.nodes):
            port = self.ports.first_node + i
            # addresses follow from a port that only this cluster has, so that two clusters have different ones
            owner = self.ports.first_node + i // _ADDRESSES_A_PORT
            address = f"127.{owner >> 8}.{owner & 255}.{1 + i % _ADDRESSES_A_PORT}"
            yield VirtualNode(f"{self.settings.name}-{i + 1:0{digits}d}", address, port)
