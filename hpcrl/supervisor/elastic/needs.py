"""What the keeper of elastic replicas needs of the launcher and of the supervisor."""

from __future__ import annotations

from typing import Protocol

from hpcrl.config.plan import RoleGroup
from hpcrl.runs.cause import CauseKind
from hpcrl.slurm.launch_arguments import Allocation
from hpcrl.supervisor.component import Component
from hpcrl.supervisor.launch.replica_launcher import Address

__all__ = ["Crew", "PlacesReplicas"]


class PlacesReplicas(Protocol):
    """What is needed of the launcher."""

    def enter_job(self, group: RoleGroup, replica: int, allocation: Allocation) -> Address:
        """From now on start this replica there; returns where it will listen.

        Raises
        ------
        NodesSilentError
            Its nodes did not say where they can be reached.
        """

    def clear_job(self, allocation: Allocation) -> None:
        """End steps that an earlier supervisor has left in a job."""


class Crew(Protocol):
    """What is needed of the supervisor."""

    def enlist(self, group: RoleGroup, replica: int, address: Address) -> Component:
        """A new component in the state PENDING, shown in the status."""

    def drive(self, component: Component) -> None:
        """Start it, and watch it to its end."""

    def dismiss(self, component: Component) -> None:
        """It is no part of the run any more."""

    def publish(self) -> None:
        """Members have changed: write the endpoints."""

    def changed(self) -> None:
        """Write the status soon."""

    def fail(self, kind: CauseKind, message: str, component: Component | None = None) -> None:
        """End the run."""

    def emit(self, kind: str, **data: object) -> None:
        """Append an event."""
