"""The cluster profile: what a site is. Every field is documented here; docs/configuration.md is made from it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from hpcrl.config.base import PositiveFloat, PositiveInt
from hpcrl.config.cluster_base import ClusterBase, LimitsConfig, PathsConfig, PortsConfig
from hpcrl.config.cluster_slurm import SlurmCluster

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
    """Deadlines."""
    max_processes: PositiveInt = 64
    """Refuse plans with more processes than this."""
    memory_gib: PositiveFloat | None = None
    """Memory for a run in GiB, read by the planner only. None: what it needs is shown, not compared."""


ClusterProfile = LocalCluster | SlurmCluster
"""A site; `isinstance` tells which."""

CLUSTER_KINDS: dict[str, type[LocalCluster] | type[SlurmCluster]] = {"local": LocalCluster, "slurm": SlurmCluster}
"""The model of each ``kind``."""

_ADAPTER: TypeAdapter[ClusterProfile] = TypeAdapter(Annotated[ClusterProfile, Field(discriminator="kind")])


def cluster_from_json(text: str | bytes) -> ClusterProfile:
    """Read a resolved profile that hpcrl wrote itself (pydantic's ValidationError where it is none)."""
    return _ADAPTER.validate_json(text)
