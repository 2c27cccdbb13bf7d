"""Replicas as steps of Slurm jobs: ``srun`` starts a guard for each task, and joins its streams to the supervisor.

::

    supervisor ──pipe──> srun ──network──> guard ──> role          (one guard a task, on its node)

Orders reach all guards of a replica, reports come back as they do on one machine. Where ``srun`` or the supervisor is
killed, the guards see their stdin close and end their roles in order.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path

from hpcrl import procfs
from hpcrl.config.cluster import ClusterProfile, SlurmCluster
from hpcrl.config.plan import Plan, Role
from hpcrl.slurm.client import SlurmClient
from hpcrl.slurm.errors import SlurmError
from hpcrl.slurm.launch import Allocation, allocations_from_env, launch_replica, step_environment
from hpcrl.supervisor.guard import end_processes
from hpcrl.supervisor.launcher import Address, ProcessSpec, RunningProcess, guard_command, start_guarded
from hpcrl.supervisor.ports import choose_ports
from hpcrl.supervisor.sweep import reap

__all__ = ["StepLauncher"]

_log = logging.getLogger(__name__)
_DOWN = frozenset({"DOWN", "NOT_RESPONDING", "FAIL", "FAILING", "POWERED_DOWN"})
_ANY_ADDRESS = "0.0.0.0"  # servers of torch listen on all addresses


class StepLauncher:
    """Steps of the job that we are in.

    Parameters
    ----------
    cluster:
        The site.
    environ:
        Environment of the batch process; ours by default.
    client:
        Asked for the addresses of nodes.
    """

    in_step = True

    def __init__(
        self,
        cluster: ClusterProfile,
        *,
        environ: Mapping[str, str] | None = None,
        client: SlurmClient | None = None,
    ) -> None:
        assert isinstance(cluster, SlurmCluster)
        self._cluster = cluster
        self._environ = dict(os.environ if environ is None else environ)
        self._client = SlurmClient() if client is None else client
        self._plan: Plan | None = None
        self._allocations: dict[tuple[int, int], Allocation] = {}

    def place(self, plan: Plan) -> dict[tuple[Role, int], Address]:
        """See `hpcrl.supervisor.launcher.Launcher.place`.

        Ports are different over all replicas, and free here: on other nodes we cannot try. Nodes belong to the run
        alone, so that what listens there is the site's, and outside of the profile's range.
        """
        self._plan = plan
        self._allocations = allocations_from_env(plan, self._environ)
        addresses = self._node_addresses()
        replicas = [(group, replica) for group in plan.groups for replica in range(group.replicas)]
        ports = choose_ports(len(replicas), first=plan.first_port, last=plan.last_port, host=_ANY_ADDRESS)
        placed = {}
        for (group, replica), port in zip(replicas, ports, strict=True):
            job, places = plan.place(group, replica)
            hosts = self._allocations[group.component, job].hosts[places.start : places.stop]
            placed[group.role, replica] = Address(addresses.get(hosts[0], hosts[0]), port, hosts)
        return placed

    def _node_addresses(self) -> dict[str, str]:
        """What to connect to, by node name; nothing where Slurm cannot be asked on nodes: names resolve there."""
        if not self._cluster.capabilities.scontrol_on_nodes:
            return {}
        return {node.name: node.address for node in self._client.nodes()}

    async def start(self, spec: ProcessSpec) -> RunningProcess:
        """See `hpcrl.supervisor.launcher.Launcher.start`."""
        assert self._plan is not None, "place comes first"
        group = self._plan.group(Role(spec.role))
        launch = launch_replica(
            self._plan,
            group,
            spec.replica,
            command=guard_command(self._plan.python or sys.executable),
            cwd=Path(spec.cwd),
            allocations=self._allocations,
        )
        return await start_guarded(launch.argv, spec, env=step_environment(self._environ), tasks=launch.tasks)

    def sweep(self, run_id: str) -> list[int]:
        """See `hpcrl.supervisor.launcher.Launcher.sweep`. Slurm ends what a job leaves behind."""
        return []

    def failed_nodes(self) -> list[str]:
        """See `hpcrl.supervisor.launcher.Launcher.failed_nodes`."""
        if not self._cluster.capabilities.scontrol_on_nodes:
            return []
        mine = {host for allocation in self._allocations.values() for host in allocation.hosts}
        try:
            nodes = self._client.nodes()
        except SlurmError as error:
            _log.warning("Slurm does not say which nodes are down: %s", error)
            return []
        # what is drained goes on until its job ends
        return [node.name for node in nodes if node.name in mine and node.states & _DOWN]

    def end_orphans(self, run_id: str, guards: Collection[int]) -> list[int]:
        """See `hpcrl.supervisor.launcher.Launcher.end_orphans`: what we adopted. Steps end with the job."""

        def find() -> list[procfs.Process]:
            return [
                process
                for process in procfs.descendants(os.getpid())
                if process.pid not in guards and not any(pid in guards for pid in procfs.ancestors(process.pid))
            ]

        orphans = find()
        end_processes(find, kill_at=time.monotonic(), between=lambda: reap(orphans))
        reap(orphans)
        return [process.pid for process in orphans]
