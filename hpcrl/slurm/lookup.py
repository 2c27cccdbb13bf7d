"""Look up the jobs of many runs by one query: the source of `hpcrl.runs.job_facts`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from hpcrl.runs.job_facts import JobFact
from hpcrl.runs.record import Submission
from hpcrl.slurm.client import SlurmClient
from hpcrl.slurm.errors import SlurmError
from hpcrl.slurm.records import Node
from hpcrl.slurm.watch import JobView, JobWatcher

_INTERVAL_S = 2.0
"""Minimum seconds between two queries of one command that follows a run."""
_WAITING_INTERVAL_S = 10.0
"""Minimum seconds between two queries while all of its jobs wait in the queue."""
_TIMEOUT_S = 10.0
_NODES_INTERVAL_S = 20.0
"""Minimum seconds between two queries about all nodes, while a job waits."""
_Place = tuple[str, str | None]
"""Target of queries: ``slurm.conf``, and the cluster where that is one of several."""
#: time of the query, and the nodes; None without an answer
_nodes: dict[_Place, tuple[float, list[Node] | None]] = {}
_watchers: dict[_Place, JobWatcher] = {}
#: number of components by job id, for all jobs requested so far: one query covers all of them
_watched: dict[_Place, dict[int, int]] = {}


def slurm_client_of(submission: Submission, *, timeout_s: float = 30.0) -> SlurmClient:
    """Return a client of the Slurm that a run was submitted to, also from a shell that is set up for another one."""
    conf = Path(submission.slurm_conf) if submission.slurm_conf else None
    return SlurmClient(conf=conf, cluster=submission.slurm_cluster, timeout_s=timeout_s)


def ask_soon() -> None:
    """Let the next look ask Slurm, because a job was just changed."""
    for watcher in _watchers.values():
        watcher.ask_soon()


def look_up(submissions: Sequence[Submission]) -> dict[str, JobFact]:
    """Return Slurm's facts about each job, by id. A Slurm that does not answer is a warning in each fact."""
    by_cluster: dict[_Place, list[Submission]] = {}
    for submission in submissions:
        by_cluster.setdefault((submission.slurm_conf, submission.slurm_cluster), []).append(submission)
    facts: dict[str, JobFact] = {}
    for place, mine in by_cluster.items():
        if place not in _watchers:
            _watchers[place] = JobWatcher(
                slurm_client_of(mine[0], timeout_s=_TIMEOUT_S),
                interval_s=_INTERVAL_S,
                waiting_interval_s=_WAITING_INTERVAL_S,
            )
        expected = _watched.setdefault(place, {})
        expected |= {int(submission.job_id): submission.components for submission in mine}
        try:
            views = _watchers[place].poll(expected, expected=expected)
        except SlurmError as error:
            warning = str(error).partition("\n")[0]
            facts |= {s.job_id: JobFact(job_id=s.job_id, state="UNKNOWN", warning=warning) for s in mine}
            continue
        owners = {int(submission.job_id): submission.user_id for submission in mine}
        found = {str(job_id): _fact(job_id, view, owners.get(job_id)) for job_id, view in views.items()}
        facts |= _with_usable_nodes(place, slurm_client_of(mine[0], timeout_s=_TIMEOUT_S), found, views)
    return facts


def _with_usable_nodes(
    place: _Place, client: SlurmClient, facts: Mapping[str, JobFact], views: Mapping[int, JobView]
) -> dict[str, JobFact]:
    """Return the facts with the number of nodes that waiting jobs could use.

    Slurm is asked at intervals, and only where a job waits.
    """
    if not any(fact.waiting for fact in facts.values()):
        return dict(facts)
    asked = _nodes.get(place)
    if asked is None or time.monotonic() - asked[0] > _NODES_INTERVAL_S:
        nodes: list[Node] | None = None
        with contextlib.suppress(SlurmError):
            nodes = client.nodes()
        asked = _nodes[place] = (time.monotonic(), nodes)
    if asked[1] is None:
        return dict(facts)
    counted = {}
    for job_id, fact in facts.items():
        last = views[int(job_id)].last
        if fact.waiting and last is not None:
            # a job may name several partitions, with commas between
            wanted = {name for component in last.components for name in component.partition.split(",")}
            usable = sum(node.usable and bool(wanted & set(node.partitions)) for node in asked[1])
            fact = msgspec.structs.replace(fact, usable_nodes=usable)  # noqa: PLW2901
        counted[job_id] = fact
    return counted


def _fact(job_id: int, view: JobView, owner: int | None) -> JobFact:
    """Return the fact about the job of this id that ``owner`` submitted (None: unknown, in an old record)."""
    if view.last is None:
        return JobFact(job_id=str(job_id), state=view.state.value, gone=view.answered, warning=view.warning)
    if None not in (owner, view.last.leader.user_id) and view.last.leader.user_id != owner:
        # job numbers start again where a site loses its state: this job belongs to another user, and the original one
        # is gone
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
