"""The submitit executor of Slurm sites: our scripts, our client, one supervisor.

What submitit is for here, and what it is not:

- **Hand-over.** It pickles the supervisor's call (`hpcrl.supervisor.job.Supervise`) into the run directory. The batch
  process (`hpcrl.slurm.batch`) looks whose files these are and becomes submitit's own, which finds the pickle by the
  job's number, however often Slurm requeues the job, and writes down how it ended.
- **Checkpoint and requeue.** Until the supervisor listens to signals itself, submitit does: a ``USR2`` in the first
  seconds calls ``Supervise.checkpoint`` and requeues the job.
- **Environment.** Which job, which node, which attempt: `submitit.JobEnvironment` reads it from Slurm's variables.

The script, its options (submitit's ``slurm_additional_parameters`` are ``job.sbatch_options`` here), sbatch itself and
its answer are hpcrl's: submitit knows neither heterogeneous jobs nor a submit that must not happen twice.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from submitit.core.core import Executor, Job
from submitit.core.utils import DelayedSubmission, JobPaths
from submitit.slurm.slurm import SlurmJob

_ANY_NUMBER_OF_TIMES = 1 << 30
"""Maximum number of requeues for submitit: a requeue at the time limit is not a failure, and the supervisor decides how
many there may be."""


class SlurmExecutor(Executor):
    """Executor for submitit's part of a submit: the pickle of the supervisor's call, for the job's batch process.

    Parameters
    ----------
    folder:
        Directory of submitit's files; visible from the nodes.
    submit:
        Submits the job whose batch process is `hpcrl.slurm.scripts.batch_process` of the folder; returns the id of the
        (leading) job.
    time_limit_s:
        Limit of the job.
    """

    job_class = SlurmJob

    def __init__(self, folder: Path, *, submit: Callable[[], int], time_limit_s: float) -> None:
        super().__init__(folder)
        self._submit = submit
        self._limit_min = max(1, int(time_limit_s // 60))

    def _internal_process_submissions(self, delayed_submissions: Sequence[DelayedSubmission]) -> list[Job[Any]]:
        """Submit one job a call. It may begin before the pickle has its name: submitit's process waits for it."""
        return [self._hand_over(delayed) for delayed in delayed_submissions]

    def _hand_over(self, delayed: DelayedSubmission) -> SlurmJob[Any]:
        pickle = JobPaths.get_first_id_independent_folder(self.folder) / f"{uuid.uuid4().hex}.pkl"
        pickle.parent.mkdir(parents=True, exist_ok=True)
        delayed.set_timeout(self._limit_min, _ANY_NUMBER_OF_TIMES)
        delayed.dump(pickle)
        try:
            job = SlurmJob[Any](folder=self.folder, job_id=str(self._submit()), tasks=[0])
            job.paths.move_temporary_file(pickle, "submitted_pickle")
        finally:
            pickle.unlink(missing_ok=True)
        return job
