"""What Slurm knows about jobs and nodes, as plain data, the same whichever command it came from."""

from __future__ import annotations

import contextlib
from typing import Literal

import msgspec

from hpcrl.slurm.hostlist import expand_hostlist
from hpcrl.slurm.node_states import jobs_are_lost, jobs_can_run
from hpcrl.slurm.states import JobState, fold_states

__all__ = ["ExitStatus", "HetComponent", "Job", "Node", "StartEstimate", "Submitted"]


class ExitStatus(msgspec.Struct, frozen=True):
    """How a batch script ended: exit code and signal number, 0 where there was none."""

    code: int
    signal: int


class HetComponent(msgspec.Struct, frozen=True, kw_only=True):
    """One component of a heterogeneous job, or a whole plain job.

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
        Requeues so far; None where the source does not say (sacct).
    user_id:
        Whose job it is; None where the source does not say.
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
    """A job with all components that Slurm told us of, in order."""

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
        """The first component; the batch script runs there."""
        return self.components[0]

    @property
    def reason(self) -> str:
        """Why it waits or ended, from the first component that has a reason."""
        return next((c.reason for c in self.components if c.reason), "")

    @property
    def nodes(self) -> list[str]:
        """Names of all its nodes; none of a component whose list cannot be read."""
        names: list[str] = []
        for component in self.components:
            with contextlib.suppress(ValueError):
                names += expand_hostlist(component.nodes)
        return names


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """One node of the cluster.

    Attributes
    ----------
    address:
        What to connect to; the name itself on most sites.
    states:
        Slurm's words, for example ``IDLE`` or ``DOWN`` and ``NOT_RESPONDING``.
    memory_mib:
        Configured memory.
    gres:
        As configured, for example ``gpu:h200:8``.
    daemon_since_s:
        Start of its slurmd, in seconds since the epoch; None where Slurm does not say.
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
        """Whether jobs on it are lost."""
        return jobs_are_lost(self.states)

    @property
    def usable(self) -> bool:
        """Whether jobs run on it, or could start there by and by."""
        return jobs_can_run(self.states)


class StartEstimate(msgspec.Struct, frozen=True):
    """What ``sbatch --test-only`` says: when (seconds since the epoch; None where it cannot be read) and its words."""

    start_time_s: float | None
    text: str


class Submitted(msgspec.Struct, frozen=True):
    """A job in the queue; ``recovered`` where it was there already, from a submission whose answer got lost."""

    job_id: int
    recovered: bool
    cluster: str = ""
    """The cluster that it went to, as ``sbatch`` names it where there are several."""
