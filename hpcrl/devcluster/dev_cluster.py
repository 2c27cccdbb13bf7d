"""A virtual cluster: up, down, status, and the faults that can be made on it."""

from __future__ import annotations

import contextlib
import getpass
import os
import signal
import time
from pathlib import Path
from typing import Literal

import msgspec

from hpcrl.devcluster.cluster_ports import choose_cluster_ports
from hpcrl.devcluster.daemons import Roster, end, find_processes, inside_job, read_daemons
from hpcrl.devcluster.packages import check_machine, require_program
from hpcrl.devcluster.place import ClusterPaths, default_home
from hpcrl.devcluster.render import write_configuration
from hpcrl.devcluster.settings import ClusterSettings, Record
from hpcrl.devcluster.start_cluster import (
    CONTROLLER,
    start_all,
    start_controller,
    start_slurmd,
    wait_for,
    wait_for_nodes,
)
from hpcrl.errors import UsageError
from hpcrl.processes import procfs
from hpcrl.slurm.client import SlurmClient
from hpcrl.slurm.errors import SlurmRejectedError, SlurmUnavailableError

_TASK_GRACE_S = 1.0
"""Jobs may clean up behind themselves (shared memory, sockets) before they are killed."""


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A node: whether its slurmd lives, and what the controller says (empty where it does not answer)."""

    name: str
    address: str
    alive: bool
    states: list[str]


class ClusterStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster as it is now; printed by ``status --json``."""

    format_version: int = 1
    name: str
    root: str
    conf: str
    slurm_version: str
    controller: Literal["answers", "silent", "paused", "dead"]
    accounting: bool
    processes: int
    memory_bytes: int
    nodes: list[NodeStatus]


class DevCluster:
    """The virtual cluster in one directory.

    Parameters
    ----------
    root:
        Its directory.
    """

    def __init__(self, root: Path) -> None:
        self.paths = ClusterPaths(root)

    @classmethod
    def named(cls, name: str, home: Path | None = None) -> DevCluster:
        """Return the cluster of this name in ``home`` (by default the user's); it need not exist."""
        return cls((default_home() if home is None else home.absolute()) / name)

    def record(self) -> Record:
        """Return the record of the created cluster (UsageError where there is none)."""
        record = self.paths.read_record()
        if record is None:
            raise UsageError(
                f"there is no virtual cluster in {self.paths.root}\n    hint: hpcrl devcluster up --name "
                f"{self.paths.root.name}, or `hpcrl devcluster ls` for those that are there"
            )
        return record

    def client(self, *, timeout_s: float = 30.0) -> SlurmClient:
        """Return a client of this cluster's Slurm."""
        return SlurmClient(conf=self.paths.conf, timeout_s=timeout_s)

    # -- up and down ---------------------------------------------------------------------------------------------

    def up(self, settings: ClusterSettings) -> Record:
        """Make the cluster and start it; returns when every node is ready for jobs.

        Raises
        ------
        UsageError
            It is there already, or this machine cannot run it; nothing was changed.
        HpcrlError
            A daemon did not start. Nothing runs; the directory stays for a look at its logs.
        """
        settings.check()
        check_machine(accounting=settings.accounting, stale=settings.stale_s is not None)
        self._refuse_existing()
        record = Record(
            settings=settings,
            ports=choose_cluster_ports(settings.nodes, accounting=settings.accounting),
            # the program reports its version without a cluster: SLURM_CONF of this shell may name one that is down
            slurm_version=SlurmClient(conf=Path(os.devnull)).version(program=require_program("slurmctld")),
            created_s=time.time(),
        )
        self.paths.check(longest_node=record.nodes[-1].name)
        self.paths.create(record)
        write_configuration(record, self.paths)
        try:
            start_all(self.paths, record)
        except BaseException:
            self._end_processes()
            raise
        return record

    def _refuse_existing(self) -> None:
        if not os.path.lexists(self.paths.root):
            return
        if not self.paths.record.is_file():
            raise UsageError(
                f"{self.paths.root} exists and is not a virtual cluster\n    hint: another --name or --home"
            )
        state = "is up already" if find_processes(self.paths) else "exists, but does not run (a failed start, a reboot)"
        name = self.paths.root.name
        raise UsageError(
            f"virtual cluster {name} {state}: {self.paths.root}\n"
            f"    hint: `hpcrl devcluster down --name {name}` first, or another --name"
        )

    def down(self) -> None:
        """End every process of the cluster and delete its directory, with all jobs and files in it.

        Raises
        ------
        UsageError
            There is none, or we are in a job of it.
        DeadlineError
            A process does not end; the directory is left, and ``down`` can be repeated.
        """
        if not self.paths.record.is_file():
            self.record()
        if inside_job(self.paths):
            raise UsageError("this is a job of the cluster that should go down\n    hint: call it from outside")
        self._end_processes()
        self.paths.remove()

    def _end_processes(self) -> None:
        # the daemons first, so that nothing starts again; then the jobs with a moment to clean up; then the rest
        roster = Roster(self.paths)
        roster.find()
        end(lambda: roster.find("daemon"))
        end(lambda: roster.find("task"), signum=signal.SIGTERM, deadline_s=_TASK_GRACE_S)
        end(roster.find)

    def shared_entries(self) -> list[str]:
        """Return the names in ``shared/``, which `down` would delete."""
        return sorted(os.listdir(self.paths.shared)) if self.paths.shared.is_dir() else []

    # -- looking -------------------------------------------------------------------------------------------------

    def status(self) -> ClusterStatus:
        """Return the status of the cluster; a controller that does not answer costs a few seconds."""
        record = self.record()
        members = find_processes(self.paths)
        controller, states = self._ask_controller()
        alive = {member.node for member in members if member.kind == "daemon"}
        return ClusterStatus(
            name=record.settings.name,
            root=str(self.paths.root),
            conf=str(self.paths.conf),
            slurm_version=f"{record.slurm_version[0]}.{record.slurm_version[1]:02d}",
            controller=controller,
            accounting=record.settings.accounting,
            processes=len(members),
            memory_bytes=sum(_memory_bytes(member.process.pid) for member in members),
            nodes=[
                NodeStatus(
                    name=node.name, address=node.address, alive=node.name in alive, states=states.get(node.name, [])
                )
                for node in record.nodes
            ],
        )

    def _ask_controller(self) -> tuple[Literal["answers", "silent", "paused", "dead"], dict[str, list[str]]]:
        daemon = self._controller()
        if daemon is None:
            return "dead", {}
        if daemon.state == "T":
            return "paused", {}
        try:
            nodes = self.client(timeout_s=5.0).nodes()
        except SlurmUnavailableError:
            return "silent", {}
        return "answers", {node.name: sorted(node.states) for node in nodes}

    def _controller(self) -> procfs.Process | None:
        record = read_daemons(self.paths).get(CONTROLLER)
        return None if record is None else record.process()

    # -- faults --------------------------------------------------------------------------------------------------

    def kill_node(self, name: str, *, noticed: bool = True) -> int:
        """Take a node away at once, as a power failure would: its slurmd and everything that jobs run on it.

        Parameters
        ----------
        noticed:
            Tell the controller. Otherwise it finds out by itself, after ``node_timeout_s``.

        Returns
        -------
        int
            Number of processes that were killed.
        """
        node = self.record().node(name)
        roster = Roster(self.paths, node=node.name)
        end(roster.find)
        if noticed:
            self.client().update_node(node.name, "DOWN", reason="hpcrl devcluster kill-node")
        return roster.seen

    def revive_node(self, name: str) -> None:
        """Bring a node back, and wait until Slurm could run jobs on it; one that lives is set usable again."""
        record = self.record()
        node = record.node(name)
        daemon = read_daemons(self.paths).get(node.name)
        if daemon is None or daemon.process() is None:
            start_slurmd(self.paths, record, node)
        client = self.client()
        state = next(found for found in client.nodes() if found.name == node.name)
        if state.states & {"DOWN", "DRAIN"}:
            with contextlib.suppress(SlurmRejectedError):  # it registered meanwhile, and is up again
                client.update_node(node.name, "RESUME")
        wait_for_nodes(self.paths, [node.name])

    def pause_controller(self, *, kill: bool = False) -> None:
        """Let slurmctld stop answering: connections hang (as with a lost network), or with ``kill`` are refused.

        Raises
        ------
        UsageError
            It does not run.
        """
        self.record()
        process = self._controller()
        if process is None:
            raise UsageError("slurmctld does not run\n    hint: hpcrl devcluster resume-controller starts it")
        procfs.send_signal([process], signal.SIGKILL if kill else signal.SIGSTOP)
        want = "dead" if kill else "paused"
        wait_for(self.paths, [], f"slurmctld is {want}", lambda: self._stopped(kill=kill))

    def _stopped(self, *, kill: bool) -> bool:
        process = self._controller()
        return process is None if kill else process is not None and process.state == "T"

    def resume_controller(self) -> None:
        """Let slurmctld go on, or start it again with what it knew; returns when it answers."""
        record = self.record()
        process = self._controller()
        if process is None:
            start_controller(self.paths, record, fresh=False)
        else:
            procfs.send_signal([process], signal.SIGCONT)
        client = self.client(timeout_s=5.0)
        wait_for(self.paths, [], "slurmctld answers", client.answers)

    # -- using ---------------------------------------------------------------------------------------------------

    def environment(self) -> dict[str, str]:
        """Return the environment variables that a shell or a program needs to use this cluster."""
        self.record()
        return {"SLURM_CONF": str(self.paths.conf)}


def list_dev_clusters(home: Path | None = None) -> list[DevCluster]:
    """Return the clusters in a home directory, running or not."""
    directory = default_home() if home is None else home.absolute()
    if not directory.is_dir():
        return []
    found = [DevCluster(path) for path in sorted(directory.iterdir())]
    return [cluster for cluster in found if cluster.paths.record.is_file()]


def limits_of_user() -> str:
    """Return a description of the functions that are missing without root; empty as root."""
    if os.geteuid() == 0:
        return ""
    user = getpass.getuser()
    return f"not run by root: jobs of {user} only, and no --stale-s"


def _memory_bytes(pid: int) -> int:
    """Return the proportional memory of a process (shared pages are split among those that share them)."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    line = next((line for line in text.splitlines() if line.startswith("Pss:")), "Pss: 0 kB")
    return int(line.split()[1]) << 10
