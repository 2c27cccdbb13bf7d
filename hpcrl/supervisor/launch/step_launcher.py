"""Replicas as steps of Slurm jobs: ``srun`` starts a guard for each task, and joins its streams to the supervisor.

::

    supervisor ──pipe──> srun ──network──> guard ──> role          (one guard a task, on its node)

Orders reach all guards of a replica, and reports return as on one machine. If ``srun`` or the supervisor is
killed, the guards see their stdin close and end their roles in order.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hpcrl.config.cluster import ClusterProfile, SlurmCluster
from hpcrl.config.plan import Plan, Role, RoleGroup
from hpcrl.errors import HpcrlError
from hpcrl.network.ports import HeldPorts, choose_blocks
from hpcrl.processes import procfs
from hpcrl.runs.cause import CauseKind
from hpcrl.runs.clocks import Clocks
from hpcrl.runs.rundir import RunDir
from hpcrl.slurm.client import SlurmClient
from hpcrl.slurm.errors import SlurmError
from hpcrl.slurm.exclude import nodes_to_exclude, stay_away
from hpcrl.slurm.job_nodes import DID_NOT_ANSWER, JobNodes
from hpcrl.slurm.launch_arguments import (
    Allocation,
    Allocations,
    allocations_from_env,
    launch_on_nodes,
    launch_replica,
    outside_environment,
    step_environment,
)
from hpcrl.slurm.states import JobState, parse_state
from hpcrl.supervisor.launch.addresses import choose_addresses, interface_of
from hpcrl.supervisor.launch.replica_launcher import Address
from hpcrl.supervisor.launch.survey import NodesSilentError, Survey
from hpcrl.supervisor.process.guard import end_processes
from hpcrl.supervisor.process.guarded import ProcessSpec, RunningProcess, guard_command, start_guarded
from hpcrl.supervisor.process.sweep import reap

_log = logging.getLogger(__name__)
_TELL_S = 5.0
_REPLICA_S = 60.0
"""Timeout in seconds for the answers of one replica's nodes."""
_ASKED_AT_ONCE = 8
_ANSWER = (sys.executable, "-P", "-m", "hpcrl.supervisor.launch.node_answers")
_ANY_ADDRESS = "0.0.0.0"  # servers of torch listen on all addresses


class StepLauncher:
    """Steps of the supervisor's job.

    Parameters
    ----------
    cluster:
        The site.
    environ:
        Environment of the batch process; the supervisor's own by default.
    client:
        Client that is asked for the addresses of nodes.
    inside:
        The job was there before, and may have more nodes than the plan.
    held:
        Holder of the run's ports on this machine, over all of its attempts.
    nodes:
        Nodes of a job with spare ones, over all of its attempts; None where it has none.

    Attributes
    ----------
    nodes:
        See the parameter.
    clocks:
        Offsets of the nodes' clocks from this machine's, of the nodes that were asked.
    """

    in_step = True

    def __init__(
        self,
        cluster: ClusterProfile,
        *,
        environ: Mapping[str, str] | None = None,
        client: SlurmClient | None = None,
        inside: bool = False,
        held: HeldPorts | None = None,
        nodes: JobNodes | None = None,
    ) -> None:
        assert isinstance(cluster, SlurmCluster)
        self._cluster = cluster
        self._environ = dict(os.environ if environ is None else environ)
        self._client = SlurmClient() if client is None else client
        self._inside, self.nodes = inside, nodes
        self._plan: Plan | None = None
        self._allocations: dict[tuple[int, int], Allocation] = {}
        self._addresses: dict[str, str] = {}
        self._reached: dict[str, str] = {}
        self._start_timeout_s = cluster.limits.start_timeout_s
        self._ports: set[int] = set()
        self._held = held or HeldPorts()
        self.clocks = Clocks()

    def place(self, plan: Plan) -> dict[tuple[Role, int], Address]:
        """See `hpcrl.supervisor.launch.replica_launcher.Launcher.place`.

        Ports are different over all replicas, and free on this node; other nodes cannot be tried. Nodes belong to the
        run alone, so that other servers there are the site's, and outside of the profile's range. Nodes of a virtual
        cluster are one machine: its runs see the ports of others.
        """
        self._plan = plan
        if self.nodes is None:
            self._allocations = allocations_from_env(plan, self._environ, spare=self._inside)
            self._reached, self.clocks = {}, Clocks()
            addresses = self._survey(self._allocations)
        else:
            addresses = self._survey_healthy(self.nodes)
        here = [group for group in plan.groups if not plan.own_jobs(group)]
        replicas = [(group, replica) for group in here for replica in range(group.replicas)]
        sizes = [group.ports for group, _ in replicas]
        self._held.release()  # those of the attempt before
        ports = self._choose(sizes)
        placed = {}
        for (group, replica), port in zip(replicas, ports, strict=True):
            job, places = plan.place(group, replica)
            hosts = self._allocations[group.component, job].hosts[places.start : places.stop]
            reached, interfaces = zip(*(addresses[host] for host in hosts), strict=True)
            placed[group.role, replica] = Address.of(group, reached, port, nodes=hosts, interfaces=interfaces)
        self._ports = {port + i for port, size in zip(ports, sizes, strict=True) for i in range(size)}
        return placed

    def _survey_healthy(self, nodes: JobNodes) -> dict[str, tuple[str, str]]:
        """Ask the first healthy nodes of the job; a spare node replaces one that does not answer.

        Slurm declares a node down only minutes after it is gone (``SlurmdTimeout``).
        """
        while True:
            nodes.look()
            self._allocations = nodes.allocations()
            self._reached, self.clocks = {}, Clocks()
            try:
                return self._survey(self._allocations)
            except NodesSilentError as error:
                silent = self._silent_among(error.nodes)
                # where too many are silent it is more likely that Slurm starts no steps
                if not silent or not nodes.enough_without(silent):
                    raise
                nodes.lose(dict.fromkeys(silent, DID_NOT_ANSWER))

    def silent_nodes(self) -> list[str]:
        """See `hpcrl.supervisor.launch.replica_launcher.Launcher.silent_nodes`."""
        if self.nodes is None or self._plan is None:
            return []
        try:
            # not those of other jobs (layout elastic)
            self._survey({key: each for key, each in self._allocations.items() if each.job_id is None})
        except NodesSilentError as error:
            return sorted(self._silent_among(error.nodes))
        except HpcrlError as error:
            _log.warning("nodes answered in another way than before: %s", error)
        return []

    def _silent_among(self, hosts: Collection[str]) -> set[str]:
        """Return the nodes on which no step of their own answers; each is asked alone, as one ends the step of all."""
        assert self._plan is not None
        components = {host: key for key, allocation in self._allocations.items() for host in allocation.hosts}

        def is_silent(host: str) -> bool:
            assert self._plan is not None
            launch = launch_on_nodes(self._plan, components[host][0], Allocation((host,)), command=_ANSWER)
            env = step_environment(self._environ)
            try:
                with Survey([(launch.argv, launch.hosts)], env=env, timeout_s=min(_REPLICA_S, self._start_timeout_s)):
                    return False
            except NodesSilentError as error:
                _log.warning("%s", error)
                return True

        asked = sorted(set(hosts) & components.keys())
        with ThreadPoolExecutor(max_workers=_ASKED_AT_ONCE) as pool:
            return {host for host, silent in zip(asked, pool.map(is_silent, asked), strict=True) if silent}

    def enter_job(self, group: RoleGroup, replica: int, allocation: Allocation) -> Address:
        """See `hpcrl.supervisor.elastic.needs.PlacesReplicas`. Blocks until the nodes have answered."""
        assert self._plan is not None, "place comes first"
        job, _ = self._plan.place(group, replica)
        self._allocations[group.component, job] = allocation
        try:
            (port,) = self._choose([group.ports], taken=self._ports)
        except HpcrlError:  # replicas that left keep theirs: on other nodes the same ports do no harm
            (port,) = self._choose([group.ports])
        self._ports.update(range(port, port + group.ports))
        addresses = self._survey({(group.component, job): allocation})
        reached, interfaces = zip(*(addresses[host] for host in allocation.hosts), strict=True)
        return Address.of(group, reached, port, nodes=allocation.hosts, interfaces=interfaces)

    def _choose(self, sizes: Sequence[int], *, taken: Collection[int] = ()) -> list[int]:
        assert self._plan is not None
        first, last = self._plan.first_port, self._plan.last_port
        return choose_blocks(sizes, first=first, last=last, host=_ANY_ADDRESS, taken=taken, held=self._held)

    def clear_job(self, allocation: Allocation) -> None:
        """See `hpcrl.supervisor.elastic.needs.PlacesReplicas`: guards end their roles at SIGTERM, the holder stays."""
        assert allocation.job_id is not None
        try:
            self._client.cancel(int(allocation.job_id), signal="TERM")
        except SlurmError as error:
            _log.warning("steps of job %s could not be ended: %s", allocation.job_id, error)

    def _survey(self, allocations: Allocations) -> dict[str, tuple[str, str]]:
        """Ask nodes for their addresses and the offsets of their clocks; return address and interface by node."""
        assert self._plan is not None, "place comes first"
        commands: list[tuple[Sequence[str], Sequence[str]]] = []
        interfaces: dict[str, str | None] = {}
        outside = any(allocation.job_id is not None for allocation in allocations.values())
        for (component, _), allocation in allocations.items():
            launch = launch_on_nodes(
                self._plan,
                component,
                allocation,
                command=_ANSWER,
            )
            commands.append((launch.argv, launch.hosts))
            interfaces |= dict.fromkeys(allocation.hosts, self._interface(component))
        env = outside_environment(self._environ) if outside else step_environment(self._environ)
        slurms = self._node_addresses(list(interfaces))
        known = {host: slurms.get(host, host) for host in interfaces}
        # the keeper of replicas has others to look after
        timeout_s = min(_REPLICA_S, self._start_timeout_s) if outside else self._start_timeout_s
        with Survey(commands, env=env, timeout_s=timeout_s) as survey:
            found = choose_addresses(survey, interfaces=interfaces, known=known, others=self._reached)
            self._reached |= found
            self.clocks = Clocks({**self.clocks.nodes, **survey.clocks()})
            return {node: (host, interface_of(survey.answers[node], host)) for node, host in found.items()}

    def _interface(self, component: int) -> str | None:
        """Return the interface that the profile names for the nodes of a component; None if it names none."""
        assert self._plan is not None
        role = Role(self._plan.layout.components[component].roles[0])
        return self._cluster.partitions[self._cluster.partition_name(role)].node.interface

    def _node_addresses(self, hosts: Collection[str]) -> dict[str, str]:
        """Return Slurm's address of each node by name; empty if Slurm cannot be asked on nodes, where names resolve.

        Each node is asked once per attempt: addresses do not change while a job has the node.
        """
        if self._cluster.capabilities.scontrol_on_nodes:
            unknown = set(hosts) - self._addresses.keys()
            self._addresses |= {node.name: node.address for node in self._client.nodes(unknown)}
        return self._addresses

    async def start(self, spec: ProcessSpec) -> RunningProcess:
        """See `hpcrl.supervisor.launch.replica_launcher.Launcher.start`."""
        assert self._plan is not None, "place comes first"
        group = self._plan.group(Role(spec.role))
        launch = launch_replica(
            self._plan,
            group,
            spec.replica,
            command=guard_command(self._plan.python or sys.executable),
            cwd=Path(spec.cwd),
            allocations=self._allocations,
            overlap=self.nodes is not None and self.nodes.steps_overlap,
        )
        outside = self._plan.own_jobs(group)
        env = outside_environment(self._environ) if outside else step_environment(self._environ)
        return await start_guarded(launch.argv, spec, env=env, tasks=launch.tasks, clocks=self.clocks)

    def sweep(self, run_id: str) -> list[int]:
        """See `hpcrl.supervisor.launch.replica_launcher.Launcher.sweep`. Slurm ends what a job leaves behind."""
        return []

    def failed_nodes(self, among: Collection[str] | None = None) -> list[str]:
        """See `hpcrl.supervisor.launch.replica_launcher.Launcher.failed_nodes`."""
        if not self._cluster.capabilities.scontrol_on_nodes:
            return []
        # a node of another job takes its replica with it, not the run
        ours = (allocation for allocation in self._allocations.values() if allocation.job_id is None)
        mine = {host for allocation in ours for host in allocation.hosts} if among is None else set(among)
        try:
            nodes = self._client.nodes(mine)
        except SlurmError as error:
            _log.warning("Slurm does not say which nodes are down: %s", error)
            return []
        # a drained node keeps running jobs until they end
        return [node.name for node in nodes if node.down]

    def stay_away(self, run: RunDir) -> None:
        """See `hpcrl.supervisor.launch.replica_launcher.Launcher.stay_away`."""
        job_id = self._environ.get("SLURM_JOB_ID", "")
        if self._inside:
            return  # no requeue will follow
        if self._plan is not None and self._cluster.capabilities.scontrol_on_nodes and job_id.isdecimal():
            nodes = nodes_to_exclude(run, self._plan, self._client)
            stay_away(self._plan, self._client, int(job_id), nodes, within_s=_TELL_S)

    def taken(self) -> tuple[CauseKind, str] | None:
        """See `hpcrl.supervisor.launch.replica_launcher.Launcher.taken`.

        If the site does not send the warning signal first, a preempted job only gets SIGTERM to its steps, which looks
        the same as a cancel from here.
        """
        job_id = self._environ.get("SLURM_JOB_ID", "")
        if not self._cluster.capabilities.scontrol_on_nodes or not job_id.isdecimal():
            return None
        try:
            records = self._client.details(int(job_id))
        except SlurmError as error:
            _log.warning("Slurm does not say what becomes of job %s: %s", job_id, error)
            return None
        if any(_since_start(record, "PreemptTime") for record in records):
            return CauseKind.PREEMPTED, "Slurm gives the nodes to another job (preemption)"
        # the supervisor's own component is COMPLETING while the supervisor still ends
        states = [parse_state(record.get("JobState", "")) for record in records]
        if any(state in (JobState.CANCELLED, JobState.COMPLETING) for state in states):
            why = "scancel, or the end of its shell" if self._inside else "scancel, or a requeue"
            return CauseKind.CANCELLED, f"job {job_id} was ended by Slurm ({why})"
        if self._inside and any(state.ended for state in states):
            return CauseKind.CANCELLED, f"the allocation, job {job_id}, was given back"
        return None

    def end_orphans(self, run_id: str, guards: Collection[int]) -> list[int]:
        """See `Launcher.end_orphans`: ends adopted processes. Steps end with the job."""
        guards = {*guards, *(set() if self.nodes is None else self.nodes.own_pids)}

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


def _since_start(record: Mapping[str, str], name: str) -> bool:
    """Return whether a time of a job is after its current start; times of earlier starts stay in the record."""
    moment, start = record.get(name, ""), record.get("StartTime", "")
    return moment.isdecimal() and start.isdecimal() and int(moment) >= int(start)
