"""The jobs of many runs by one query: the source of `hpcrl.runs.jobs`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpcrl.runs.jobs import JobFact
from hpcrl.runs.record import Submission
from hpcrl.slurm.client import SlurmClient
from hpcrl.slurm.errors import SlurmError
from hpcrl.slurm.watch import JobView, JobWatcher

__all__ = ["client_of", "look_up"]

_INTERVAL_S = 2.0
"""Between two questions of one command that follows a run."""
_TIMEOUT_S = 10.0
_watchers: dict[str, JobWatcher] = {}
#: components by job id, of all jobs that were ever asked about: one question is for all of them
_watched: dict[str, dict[int, int]] = {}


def client_of(submission: Submission, *, timeout_s: float = 30.0) -> SlurmClient:
    """A client of the Slurm that a run was submitted to, also from a shell that is set up for another one."""
    return SlurmClient(conf=Path(submission.slurm_conf) if submission.slurm_conf else None, timeout_s=timeout_s)


def look_up(submissions: Sequence[Submission]) -> dict[str, JobFact]:
    """What Slurm says about each job, by id. A Slurm that does not answer is a warning in each fact."""
    by_cluster: dict[str, list[Submission]] = {}
    for submission in submissions:
        by_cluster.setdefault(submission.slurm_conf, []).append(submission)
    facts: dict[str, JobFact] = {}
    for conf, mine in by_cluster.items():
        if conf not in _watchers:
            _watchers[conf] = JobWatcher(client_of(mine[0], timeout_s=_TIMEOUT_S), interval_s=_INTERVAL_S)
        expected = _watched.setdefault(conf, {})
        expected |= {int(submission.job_id): submission.components for submission in mine}
        try:
            views = _watchers[conf].poll(expected, expected=expected)
        except SlurmError as error:
            warning = str(error).split("\n", 1)[0]
            facts |= {s.job_id: JobFact(job_id=s.job_id, state="UNKNOWN", warning=warning) for s in mine}
            continue
        owners = {int(submission.job_id): submission.user_id for submission in mine}
        facts |= {str(job_id): _fact(job_id, view, owners.get(job_id)) for job_id, view in views.items()}
    return facts


def _fact(job_id: int, view: JobView, owner: int | None) -> JobFact:
    """What became of the job with this id that ``owner`` submitted (None: an old record does not say who)."""
    if view.last is None:
        return JobFact(job_id=str(job_id), state=view.state.value, gone=view.answered, warning=view.warning)
    if None not in (owner, view.last.leader.user_id) and view.last.leader.user_id != owner:
        # numbers begin again where a site loses its state: this is somebody else's job, and ours is no more
        return JobFact(job_id=str(job_id), state="UNKNOWN", gone=view.answered, warning=view.warning)
    return JobFact(
        job_id=str(job_id),
        state=view.state.value,
        waiting=view.state.waiting,
        holding=view.state.holding,
        ended=view.state.ended,
        gone=view.answered and view.state.value == "UNKNOWN" and view.last.state.ended,
        reason=view.last.reason,
        nodes=view.last.nodes,
        restarts=view.last.leader.restarts,
        start_s=view.last.leader.start_time_s,
        end_s=view.last.leader.end_time_s,
        warning=view.warning,
    )
