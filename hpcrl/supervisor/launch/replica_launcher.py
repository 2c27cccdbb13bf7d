"""Turns replicas into processes; only this module knows where roles run.

`LocalLauncher` starts them on this machine. Under Slurm another launcher puts ``srun`` with a node list or a
het-group in front; nothing above this module knows which.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from hpcrl.config.plan import Plan, Role, RoleGroup
from hpcrl.network.interfaces import http_url
from hpcrl.network.ports import HeldPorts, choose_blocks
from hpcrl.runs.cause import CauseKind
from hpcrl.runs.clocks import Clocks
from hpcrl.runs.rundir import RunDir
from hpcrl.slurm.job_nodes import JobNodes
from hpcrl.supervisor.process.guarded import ProcessSpec, RunningProcess, guard_command, start_guarded
from hpcrl.supervisor.process.sweep import end_orphans, sweep


class Address(NamedTuple):
    """Address and nodes of a replica."""

    host: str
    port: int
    nodes: tuple[str, ...] = ()
    """Slurm's names of the replica's nodes; empty on this machine."""
    hosts: tuple[str, ...] = ()
    """Address of each of these nodes."""
    interfaces: tuple[str, ...] = ()
    """The network interface of each of these addresses."""
    servers: tuple[tuple[str, int], ...] = ()
    """Host and port of each HTTP server, in the order of ranks; empty where there is one, at ``host`` and ``port``."""

    @classmethod
    def of(
        cls,
        group: RoleGroup,
        hosts: Sequence[str],
        port: int,
        *,
        nodes: tuple[str, ...] = (),
        interfaces: Sequence[str] = (),
    ) -> Address:
        """Return the address of a replica of ``group`` whose nodes are reached at ``hosts``."""
        servers = tuple((host, port + i) for host in hosts for i in range(group.servers_per_node))
        return cls(hosts[0], port, nodes, tuple(hosts), tuple(interfaces), servers if len(servers) > 1 else ())

    @property
    def url(self) -> str:
        """Return the URL of the replica's first server."""
        return http_url(self.host, self.port)

    @property
    def urls(self) -> tuple[str, ...]:
        """Return the URLs of all of its servers, in the order of ranks."""
        return tuple(http_url(host, port) for host, port in self.servers) or (self.url,)


class Launcher(Protocol):
    """Starts replicas."""

    @property
    def in_step(self) -> bool:
        """Return whether replicas are steps of a Slurm job."""

    @property
    def nodes(self) -> JobNodes | None:
        """Return the nodes of a job with spare ones; None where it has none."""

    @property
    def clocks(self) -> Clocks:
        """Return the offsets of the nodes' clocks from the clock of this machine; known after `place`."""

    def place(self, plan: Plan) -> dict[tuple[Role, int], Address]:
        """Choose host and port of every replica of every role. Blocks until the nodes have answered.

        Raises
        ------
        NodesSilentError
            Not all of them did.
        HpcrlError
            An address or port cannot be had.
        """

    async def start(self, spec: ProcessSpec) -> RunningProcess:
        """Start a replica; returns as soon as its guard runs."""

    def sweep(self, run_id: str) -> list[int]:
        """End what an earlier attempt left behind, before this one starts; returns the pids. Blocks for a moment."""

    def end_orphans(self, run_id: str, guards: Collection[int]) -> list[int]:
        """End processes without a running guard as ancestor; return their pids. ``guards`` are the running ones."""

    def failed_nodes(self, among: Collection[str] | None = None) -> list[str]:
        """Return the nodes known to be down now: those of the supervisor's job, or ``among`` others. Blocks briefly."""

    def silent_nodes(self) -> list[str]:
        """Return the nodes in use on which no step starts, of a job with spare nodes. Blocks until a timeout."""

    def stay_away(self, run: RunDir) -> None:
        """Keep the supervisor's job, if it is pending again already, away from the excluded nodes of the run.

        Blocks for seconds.
        """

    def taken(self) -> tuple[CauseKind, str] | None:
        """Return why Slurm is taking the nodes away now, as kind and words; None if it is not. Blocks briefly."""


class LocalLauncher:
    """Processes on this machine."""

    host, interface = "127.0.0.1", "lo"
    in_step = False
    nodes = None
    clocks = Clocks()

    def __init__(self, held: HeldPorts | None = None) -> None:
        """Prepare; ``held`` holds the ports of the run, over all of its attempts."""
        self._held = held or HeldPorts()

    def place(self, plan: Plan) -> dict[tuple[Role, int], Address]:
        """See `Launcher.place`."""
        self._held.release()  # those of the attempt before
        replicas = [(group, replica) for group in plan.groups for replica in range(group.replicas)]
        # nodes of a replica are all this machine: each has ports of its own
        sizes = [group.ports * group.nodes for group, _ in replicas]
        ports = choose_blocks(sizes, first=plan.first_port, last=plan.last_port, host=self.host, held=self._held)
        return {
            (group.role, replica): Address.of(group, [self.host], port, interfaces=[self.interface])
            for (group, replica), port in zip(replicas, ports, strict=True)
        }

    async def start(self, spec: ProcessSpec) -> RunningProcess:
        """See `Launcher.start`."""
        return await start_guarded(guard_command(sys.executable), spec, env=os.environ)

    def sweep(self, run_id: str) -> list[int]:
        """See `Launcher.sweep`."""
        return [process.pid for process in sweep(run_id)]

    def end_orphans(self, run_id: str, guards: Collection[int]) -> list[int]:
        """See `Launcher.end_orphans`."""
        return [process.pid for process in end_orphans(run_id, guards)]

    def failed_nodes(self, among: Collection[str] | None = None) -> list[str]:
        """See `Launcher.failed_nodes`: if this machine were down, the supervisor would be, too."""
        return []

    def silent_nodes(self) -> list[str]:
        """See `Launcher.silent_nodes`."""
        return []

    def stay_away(self, run: RunDir) -> None:
        """See `Launcher.stay_away`: on this machine no scheduler restarts the run."""

    def taken(self) -> tuple[CauseKind, str] | None:
        """See `Launcher.taken`."""
        return None
