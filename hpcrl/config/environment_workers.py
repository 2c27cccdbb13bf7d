"""Workers that host the environments of a run, as a role of their own."""

from __future__ import annotations

from typing import Literal

from hpcrl.config.base import PositiveFloat, PositiveInt, StrictModel


class EnvironmentWorkersConfig(StrictModel):
    """The role ``env``: workers that host all environments of the recipe. Each of them hosts every environment."""

    count: PositiveInt
    """Number of workers."""
    placement: Literal["apart", "trainer_node"] = "apart"
    """``apart``: on nodes of their own, of the partition of the role ``env``. ``trainer_node``: on the trainer's first
    node. On this machine it has no effect."""
    per_node: PositiveInt = 1
    """Number of workers on a node of their own. On the trainer's first node all of them are."""
    cpus: PositiveInt | None = None
    """CPUs of a worker on a node of their own. None: an equal part of the node."""
    memory_gib: PositiveFloat | None = None
    """Memory of a worker on a node of their own, in GiB. With it and ``cpus`` jobs ask for these parts of nodes, which
    other jobs may share. None: the job asks for whole nodes, and workers on one node have no bounds of their own."""

    @property
    def apart(self) -> bool:
        """Return whether workers have nodes of their own on a cluster."""
        return self.placement == "apart"

    @property
    def nodes(self) -> int:
        """Return the number of nodes of their own."""
        return -(-self.count // self.per_node) if self.apart else 0

    @property
    def shares_nodes(self) -> bool:
        """Return whether a job asks for parts of nodes."""
        return self.cpus is not None and self.memory_gib is not None
