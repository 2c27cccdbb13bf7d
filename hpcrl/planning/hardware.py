"""The numbers of a cluster profile that the planner computes with; one that is missing is named, never guessed."""

from __future__ import annotations

from dataclasses import dataclass

from hpcrl.config.cluster import ClusterProfile, SlurmCluster
from hpcrl.config.cluster_slurm import NodeConfig
from hpcrl.config.plan import Role
from hpcrl.errors import ConfigError, Finding


def missing_number(cluster: ClusterProfile, key: str, what: str) -> ConfigError:
    """Return the error for a number that the plan needs and the profile lacks; ``key`` is relative to the profile."""
    return ConfigError(
        [
            Finding(
                f"cluster profile {cluster.name}",
                f"cluster.{key}",
                f"{what} is not in the profile, and hpcrl does not guess hardware",
                f"write {key} into the profile (docs/configuration.md says where to read it off)",
            )
        ]
    )


@dataclass(frozen=True)
class NodeHardware:
    """A node of one role. Each property raises `ConfigError` where the profile lacks its number.

    Rates are bytes a second each way, sizes are bytes.
    """

    cluster: SlurmCluster
    partition: str
    node: NodeConfig

    def _number(self, value: float | None, key: str, what: str, scale: float) -> float:
        if value is None:
            raise missing_number(self.cluster, f"partitions.{self.partition}.node.{key}", what)
        return value * scale

    @property
    def gpus(self) -> int:
        """Return the number of GPUs of the node."""
        return self.node.gpus

    @property
    def host_bytes(self) -> int:
        """Return the bytes of the host memory."""
        return int(self.node.memory_gib * (1 << 30))

    @property
    def gpu_bytes(self) -> int:
        """Return the bytes of a GPU's memory."""
        return int(self._number(self.node.gpu.memory_gib, "gpu.memory_gib", "memory of a GPU", float(1 << 30)))

    @property
    def gpu_memory_rate(self) -> float:
        """Return the bandwidth of a GPU's memory."""
        return self._number(self.node.gpu.memory_gb_s, "gpu.memory_gb_s", "bandwidth of a GPU's memory", 1e9)

    def gpu_flops(self, dtype: str) -> float:
        """Return the peak operations a second of a GPU in ``dtype`` (float32, bfloat16 or fp8)."""
        peak = next((value for key, value in self.node.gpu.tflops.items() if key == dtype), None)
        return self._number(peak, f"gpu.tflops.{dtype}", f"speed of a GPU in {dtype}", 1e12)

    @property
    def nvlink_rate(self) -> float:
        """Return the rate of a GPU to the others of its node."""
        return self._number(self.node.gpu.nvlink_gb_s, "gpu.nvlink_gb_s", "NVLink rate of a GPU", 1e9)

    @property
    def pcie_rate(self) -> float:
        """Return the rate between host memory and one GPU."""
        return self._number(self.node.gpu.pcie_gb_s, "gpu.pcie_gb_s", "rate between host and GPU", 1e9)

    @property
    def nic_rate(self) -> float:
        """Return the rate of all adapters of the node together."""
        total = 0.0
        for i, nic in enumerate(self.node.nics):
            total += self._number(nic.gb_s, f"nics.{i}.gb_s", f"rate of adapter {nic.name}", 1e9)
        if not total:
            raise missing_number(self.cluster, f"partitions.{self.partition}.node.nics", "an adapter with its rate")
        return total

    @property
    def host_memory_rate(self) -> float:
        """Return the bandwidth of the host memory."""
        return self._number(self.node.memory_gb_s, "memory_gb_s", "bandwidth of the host memory", 1e9)


def node_hardware(cluster: SlurmCluster, role: Role) -> NodeHardware:
    """Return the hardware of the nodes that a role runs on (the trainer's for roles on the trainer's nodes)."""
    partition = cluster.partition_name(Role.TRAINER if role in (Role.STORE, Role.ROUTER) else role)
    return NodeHardware(cluster, partition, cluster.partitions[partition].node)


def filesystem_rate(cluster: SlurmCluster, key: str) -> float:
    """Return a rate of the shared filesystem in bytes a second (ConfigError where the cluster profile lacks it).

    ``key`` is a field of `FilesystemConfig`, whose values are in GB a second.
    """
    value: float | None = getattr(cluster.filesystem, key)
    if value is None:
        raise missing_number(cluster, f"filesystem.{key}", "rate of the shared filesystem")
    return value * 1e9
