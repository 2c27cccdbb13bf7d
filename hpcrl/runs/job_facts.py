"""State of a run's job by Slurm, for readers. The source that asks Slurm is set at the start of a command."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from hpcrl.runs.record import Submission


class JobFact(msgspec.Struct, frozen=True, kw_only=True):
    """State of a job as far as Slurm reported it.

    Attributes
    ----------
    job_id:
        Id; of a heterogeneous job, that of its first component.
    state:
        Slurm's state, for example ``PENDING``; ``UNKNOWN`` where it gave none.
    waiting, holding, ended:
        In the queue; has nodes; is over. None of them where the state is unknown.
    gone:
        Slurm answered, and does not know the job (any more).
    reason:
        Reason why it waits or ended, in Slurm's words.
    nodes:
        Names of its nodes.
    restarts:
        Requeues so far; None where Slurm does not report it.
    start_s, end_s:
        Seconds since the epoch: start (of a waiting job Slurm's guess), and end (of a running one its limit).
    usable_nodes:
        Nodes of its partitions on which jobs run or could start, while it waits; None where Slurm was not asked.
    warning:
        Reason why the state is unknown.
    """

    job_id: str
    state: str
    waiting: bool = False
    holding: bool = False
    ended: bool = False
    gone: bool = False
    reason: str = ""
    nodes: list[str] = []
    restarts: int | None = None
    start_s: float | None = None
    end_s: float | None = None
    usable_nodes: int | None = None
    warning: str = ""


JobSource = Callable[[Sequence[Submission]], Mapping[str, JobFact]]
"""Asks Slurm about the jobs of submissions at once; the answer is by job id."""

_sources: list[JobSource] = []


def set_job_query(source: JobSource) -> None:
    """Set the source of job facts."""
    _sources[:] = [source]


def query_jobs(submissions: Sequence[Submission]) -> Mapping[str, JobFact]:
    """Return facts by job id about submissions to Slurm; empty without a source."""
    wanted = [submission for submission in submissions if submission.executor == "slurm"]
    return _sources[0](wanted) if wanted and _sources else {}
