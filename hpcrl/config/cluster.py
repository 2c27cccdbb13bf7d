"""The cluster profile: what a site is. Every field is documented here; docs/configuration.md is made from it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from hpcrl.config.base import PositiveFloat, PositiveInt
from hpcrl.config.cluster_base import ClusterBase, LimitsConfig, PathsConfig, PortsConfig
from hpcrl.config.cluster_slurm import NodeConfig, SlurmCluster

__all__ = [
    "CLUSTER_KINDS",
    "ClusterProfile",
    "LimitsConfig",
    "LocalCluster",
    "PathsConfig",
    "PortsConfig",
    "SlurmCluster",
    "cluster_from_json",
]


class LocalCluster(ClusterBase):
    """This machine, without Slurm: every role is a process on loopback."""

    kind: Literal["local"]
    """``local``: everything runs on this machine, without Slurm."""
    paths: PathsConfig
    """Directories."""
    limits: LimitsConfig = LimitsConfig()
    """Timeouts and time limits."""
    max_processes: PositiveInt = 64
    """Refuse plans with more processes than this."""
    memory_gib: PositiveFloat | None = None
    """Memory for a run in GiB, read by the planner only. None: what it needs is shown, not compared."""

    @property
    def uses_slurm(self) -> bool:
        """Return whether runs are jobs of Slurm, on other machines."""
        return False

    @property
    def scratch(self) -> str | None:
        """Return the directory on a disk of each node; None where the profile names none."""
        return None

    def node_of(self, role: str) -> NodeConfig | None:
        """Return the nodes of a role, as the profile describes them; None where it describes none."""
        return None


ClusterProfile = LocalCluster | SlurmCluster
"""A site; `isinstance` tells which."""

CLUSTER_KINDS: dict[str, type[LocalCluster] | type[SlurmCluster]] = {"local": LocalCluster, "slurm": SlurmCluster}
"""The model of each ``kind``."""

_ADAPTER: TypeAdapter[ClusterProfile] = TypeAdapter(Annotated[ClusterProfile, Field(discriminator="kind")])


def cluster_from_json(text: str | bytes) -> ClusterProfile:
    """Read a resolved profile that hpcrl wrote itself (pydantic's ValidationError where it is none)."""
    return _ADAPTER.validate_json(text)
