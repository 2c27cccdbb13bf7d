"""Jobs of single replicas (layout ``elastic``): submit one, list all, cancel.

Slurm is the only source about which of them exist: each has the run id, the number of the submission and its replica in
its comment, so that no file can contradict it. Submitting a replica that has a job which has not ended changes nothing.

These jobs are not submitted by submitit, as the main one is: their batch process (`hpcrl.supervisor.elastic.holder`)
has no state to pickle, to save at a signal or to restore after a requeue, and the supervisor submits it from a node.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.plan import Plan, RoleGroup
from hpcrl.runs.record import RunRecord
from hpcrl.runs.rundir import RunDir
from hpcrl.slurm.client import SlurmClient
from hpcrl.slurm.directives import JobIdentity
from hpcrl.slurm.errors import SlurmError
from hpcrl.slurm.exclude import nodes_to_exclude
from hpcrl.slurm.records import Job
from hpcrl.slurm.render import replica_part
from hpcrl.slurm.scripts import run_scripts, submission_id
from hpcrl.storage.files import atomic_write

_log = logging.getLogger(__name__)


class LivingJob(NamedTuple):
    """Job of the run that has not ended; ``part`` is ``main`` or ``<role>-<replica>``."""

    submission: str
    part: str
    job: Job


class ReplicaJobs:
    """Jobs of the replicas of one submission of a run.

    Parameters
    ----------
    number:
        Number of the submission, from 1.
    """

    def __init__(self, run: RunDir, *, plan: Plan, client: SlurmClient, number: int) -> None:
        cluster = run.cluster()
        assert isinstance(cluster, SlurmCluster)
        self._run, self._plan, self._cluster, self._client = run, plan, cluster, client
        self._run_id = RunRecord.read(run).run_id
        self.number = number

    def submit(self, group: RoleGroup, replica: int, *, after: int | None = None) -> int:
        """Submit the job of a replica unless it has a job that has not ended; return the id of the job.

        Parameters
        ----------
        after:
            Main job of the run, where that has not begun yet: the replica must not take the nodes that it waits for.
        """
        token = submission_id(self._run_id, self.number)
        (script,) = run_scripts(
            self._plan,
            self._cluster,
            run_id=self._run_id,
            run_dir=self._run.path,
            number=self.number,
            exclude=nodes_to_exclude(self._run, self._plan, self._client),
            parts=[replica_part(group, replica)],
        )
        path = self._run.path / script.file_name
        atomic_write(path, script.text.encode())
        identity = JobIdentity(self._run.name, token, script.part)
        options = [] if after is None else [f"--dependency=after:{after}"]
        submitted = self._client.submit(path, name=identity.name, token=identity.token, options=options, again=True)
        return submitted.job_id

    def let_main_go_first(self, main: int) -> None:
        """Make waiting replica jobs start only after the main job, which waits as well; Slurm releases them itself.

        Raises
        ------
        hpcrl.slurm.errors.SlurmError
            Slurm does not say which jobs there are, does not answer, or one of them has just started.
        """
        waiting = [each.job.job_id for each in self.living() if each.part != "main" and each.job.state.waiting]
        if waiting:
            self._client.start_after(waiting, main)

    def living(self) -> list[LivingJob]:
        """Return all jobs of the run that have not ended, of all submissions, oldest first."""
        return _living(self._client, self._run_id)

    def cancel(self, living: LivingJob) -> None:
        """Cancel one."""
        self._client.cancel(living.job.job_id)

    def last_word(self, job_id: int) -> str:
        """Return a sentence with Slurm's final state of a job; empty where Slurm does not know it (any more)."""
        job = self._client.jobs([job_id]).get(job_id)
        return f"Slurm says that job {job_id} is {job.state}" if job is not None and job.state.ended else ""

    def ours(self, living: LivingJob) -> bool:
        """Return whether a job belongs to this submission."""
        return living.submission == submission_id(self._run_id, self.number)


def cancel_all(client: SlurmClient, run_id: str, *, keep_main: bool = False) -> list[int]:
    """Cancel all jobs of a run that have not ended, of all its submissions, except the main one with ``keep_main``.

    Returns
    -------
    list[int]
        Ids of the jobs that were cancelled.

    Raises
    ------
    SlurmError
        Slurm does not list the jobs, or one could not be cancelled; those after it were not tried.
    """
    found = [living for living in _living(client, run_id) if not (keep_main and living.part == "main")]
    for living in found:
        client.cancel(living.job.job_id)
    return [living.job.job_id for living in found]


def cancel_replicas(client: SlurmClient, run_id: str) -> None:
    """Free the nodes of a run's replicas at its end. Where Slurm does not answer, their holders end by themselves."""
    try:
        cancel_all(client, run_id, keep_main=True)
    except SlurmError as error:
        _log.warning("jobs of replicas were not cancelled; they end when they see the end of the run: %s", error)


def _living(client: SlurmClient, run_id: str) -> list[LivingJob]:
    found = []
    for _, (token, job) in sorted(client.of_run(run_id).items()):
        submission, _, part = token.partition(":")
        # a run id is hexadecimal: what follows it is the number of the submission
        if not job.state.ended and submission.partition("-")[0] == run_id:
            found.append(LivingJob(submission, part, job))
    return found
