"""Interfaces that the keeper of elastic replicas needs from the launcher and from the supervisor."""

from __future__ import annotations

from typing import Protocol

from hpcrl.config.plan import RoleGroup
from hpcrl.runs.cause import CauseKind
from hpcrl.slurm.launch_arguments import Allocation
from hpcrl.supervisor.launch.replica_launcher import Address
from hpcrl.supervisor.replicas.component import Component


class PlacesReplicas(Protocol):
    """Interface to the launcher."""

    def enter_job(self, group: RoleGroup, replica: int, allocation: Allocation) -> Address:
        """Start this replica in the job's allocation from now on; return the address where it will listen.

        Raises
        ------
        NodesSilentError
            Its nodes did not report their addresses.
        """

    def clear_job(self, allocation: Allocation) -> None:
        """End steps that an earlier supervisor has left in a job."""


class ReplicaHost(Protocol):
    """Interface to the supervisor."""

    def register(self, group: RoleGroup, replica: int, address: Address) -> Component:
        """Add a new component in the state PENDING to the run and its status; return it."""

    def drive(self, component: Component) -> None:
        """Start the component and watch it until it ends."""

    def unregister(self, component: Component) -> None:
        """Remove the component from the run."""

    def publish(self) -> None:
        """Write the endpoints after the members have changed."""

    def changed(self) -> None:
        """Write the status soon."""

    def fail(self, kind: CauseKind, message: str, component: Component | None = None) -> None:
        """End the run."""

    def emit(self, kind: str, **data: object) -> None:
        """Append an event."""
