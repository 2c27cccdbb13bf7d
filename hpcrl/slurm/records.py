"""Records of jobs and nodes as plain data, the same for every Slurm command that they come from."""

from __future__ import annotations

import contextlib
from typing import Literal

import msgspec

from hpcrl.slurm.hostlist import expand_hostlist
from hpcrl.slurm.node_states import jobs_are_lost, jobs_can_run
from hpcrl.slurm.states import JobState, fold_states


class ExitStatus(msgspec.Struct, frozen=True):
    """Exit code and signal number of a batch script, 0 where there was none."""

    code: int
    signal: int


class HetComponent(msgspec.Struct, frozen=True, kw_only=True):
    """Component of a heterogeneous job, or a whole plain job.

    Attributes
    ----------
    job_id:
        Its own id.
    leader_id:
        Id of component 0, which names the job; equals ``job_id`` for a plain job.
    offset:
        Its number in the job.
    nodes:
        Node list as Slurm writes it; empty without nodes.
    submit_time_s, start_time_s, end_time_s:
        Seconds since the epoch. For a waiting job the start is Slurm's guess, for a running one the end is its
        limit.
    time_limit_s:
        None where there is no limit.
    restarts:
        Requeues so far; None where the source does not have them (sacct).
    user_id:
        Owner of the job; None where the source does not have it.
    """

    job_id: int
    leader_id: int
    offset: int
    state: JobState
    source: Literal["squeue", "sacct"]
    name: str = ""
    comment: str = ""
    partition: str = ""
    reason: str = ""
    nodes: str = ""
    submit_time_s: float | None = None
    start_time_s: float | None = None
    end_time_s: float | None = None
    time_limit_s: float | None = None
    restarts: int | None = None
    user_id: int | None = None
    exit: ExitStatus | None = None


class Job(msgspec.Struct, frozen=True):
    """Job with all components that Slurm reported, in order."""

    job_id: int
    state: JobState
    components: tuple[HetComponent, ...]

    @classmethod
    def of(cls, components: list[HetComponent], *, expected: int | None = None) -> Job:
        """Join the components of one job (not empty); see `hpcrl.slurm.states.fold_states`."""
        ordered = tuple(sorted(components, key=lambda component: component.offset))
        state = fold_states([component.state for component in ordered], expected=expected)
        return cls(ordered[0].leader_id, state, ordered)

    @property
    def leader(self) -> HetComponent:
        """Return the first component, in which the batch script runs."""
        return self.components[0]

    @property
    def reason(self) -> str:
        """Return why the job waits or ended, from the first component that has a reason."""
        return next((c.reason for c in self.components if c.reason), "")

    @property
    def nodes(self) -> list[str]:
        """Return the names of all its nodes; none of a component whose node list cannot be read."""
        names: list[str] = []
        for component in self.components:
            with contextlib.suppress(ValueError):
                names += expand_hostlist(component.nodes)
        return names


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """Node of the cluster.

    Attributes
    ----------
    address:
        Address to connect to; the name itself on most sites.
    states:
        Slurm's words, for example ``IDLE`` or ``DOWN`` and ``NOT_RESPONDING``.
    memory_mib:
        Configured memory.
    gres:
        Configured resources, for example ``gpu:h200:8``.
    daemon_since_s:
        Start of its slurmd, in seconds since the epoch; None where Slurm does not report it.
    """

    name: str
    address: str
    states: frozenset[str]
    cpus: int
    memory_mib: int
    gres: str
    partitions: tuple[str, ...]
    reason: str
    daemon_since_s: float | None = None

    @property
    def down(self) -> bool:
        """Return whether jobs on the node are lost."""
        return jobs_are_lost(self.states)

    @property
    def usable(self) -> bool:
        """Return whether jobs run on the node, or could start there later without an administrator."""
        return jobs_can_run(self.states)


class StartEstimate(msgspec.Struct, frozen=True):
    """Result of ``sbatch --test-only``: start in seconds since the epoch (None where unreadable), and its text."""

    start_time_s: float | None
    text: str


class Submitted(msgspec.Struct, frozen=True):
    """Job in the queue; ``recovered`` where it existed already, from a submission whose answer was lost."""

    job_id: int
    recovered: bool
    cluster: str = ""
    """Cluster of the job, as ``sbatch`` names it where there are several."""
