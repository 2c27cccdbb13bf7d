"""What Slurm says about the job of a run, for readers. Who can ask Slurm is told at the start of a command."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from hpcrl.runs.record import Submission

__all__ = ["JobFact", "JobSource", "ask", "use_source"]


class JobFact(msgspec.Struct, frozen=True, kw_only=True):
    """A job as far as Slurm told.

    Attributes
    ----------
    job_id:
        Of a heterogeneous job, that of its first component.
    state:
        Slurm's word, for example ``PENDING``; ``UNKNOWN`` where it did not say.
    waiting, holding, ended:
        In the queue; has nodes; is over. None of them where the state is unknown.
    gone:
        Slurm answered, and does not know the job (any more).
    reason:
        Why it waits or ended, in Slurm's words.
    nodes:
        Names of its nodes.
    restarts:
        Requeues so far; None where Slurm does not say.
    start_s, end_s:
        Seconds since the epoch: start (of a waiting job Slurm's guess), and end (of a running one its limit).
    usable_nodes:
        Nodes of its partitions on which jobs run or could start, while it waits; None where nobody asked.
    warning:
        Why the state is unknown.
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


def use_source(source: JobSource) -> None:
    """From now on ask here."""
    _sources[:] = [source]


def ask(submissions: Sequence[Submission]) -> Mapping[str, JobFact]:
    """Facts by job id about submissions to Slurm; nothing where nobody can be asked."""
    wanted = [submission for submission in submissions if submission.executor == "slurm"]
    return _sources[0](wanted) if wanted and _sources else {}
