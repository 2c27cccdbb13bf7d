"""What submitit runs: one callable with plain arguments, the same on this machine and under Slurm."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path

from submitit.core.utils import DelayedSubmission

from hpcrl.errors import ExitCode, RunDirError, RunFailedError
from hpcrl.runs.cause import Cause, CauseKind
from hpcrl.runs.record import RunRecord
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunState, RunStatus
from hpcrl.slurm.client import SlurmClient
from hpcrl.slurm.errors import SlurmError, SlurmUnavailableError
from hpcrl.supervisor.launcher import LocalLauncher
from hpcrl.supervisor.step_launcher import StepLauncher
from hpcrl.supervisor.supervisor import Supervisor

__all__ = ["Supervise"]

_log = logging.getLogger(__name__)
_ASK_AGAIN_S = 5.0
_KILLED_WITHIN_S = 120.0
"""Slurm ends the job that it requeues, us with it."""


@dataclass(frozen=True)
class Supervise:
    """Supervise the next attempt of the run in ``run_dir``.

    Everything else is read from there when it runs, so that it stays valid when Slurm requeues the job.
    """

    run_dir: str

    def __call__(self) -> str:
        """Run the attempt. Returns ``COMPLETED``; any other end is an exception, so that the job fails, too.

        Raises
        ------
        RunFailedError
            The run failed or was cancelled; the message is the cause.
        RunDirError
            The directory is no run, or another supervisor works in it.
        """
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        run = RunDir(Path(self.run_dir))
        plan, record = run.plan(), RunRecord.read(run)
        status = RunStatus.read(run)
        # Slurm has one batch process a job: what the status says is of the attempt before the requeue
        requeued = int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0
        if status is not None and not requeued and not status.state.ended and status.supervisor_alive(time.time()):
            raise RunDirError(f"{run.name} is supervised by pid {status.supervisor.pid} on {status.supervisor.host}")

        async def supervise() -> tuple[RunState, Cause | None]:
            launcher = LocalLauncher() if plan.layout.kind == "local" else StepLauncher(run.cluster())
            supervisor = Supervisor(run, run_id=record.run_id, plan=plan, launcher=launcher)
            return await supervisor.run()

        state, cause = asyncio.run(supervise())
        if state is RunState.REQUEUED:
            _requeue()
        if cause is not None and cause.kind is CauseKind.NO_PROGRESS:
            raise SystemExit(ExitCode.NO_PROGRESS)
        message = "" if cause is None else cause.message
        if state is not RunState.COMPLETED:
            raise RunFailedError(f"{run.name}: {state}: {message}")
        return state.value

    def checkpoint(self) -> DelayedSubmission:
        """What submitit hands to the next attempt where Slurm's warning comes before we listen to it ourselves."""
        return DelayedSubmission(self)


def _requeue() -> None:
    """Put our job back into the queue, however long Slurm takes to answer: the time limit ends us otherwise."""
    client, job_id = SlurmClient(), int(os.environ["SLURM_JOB_ID"])
    while True:
        try:
            client.requeue(job_id)
            break
        except SlurmUnavailableError as error:
            _log.warning("the requeue got no answer, asking again: %s", error)
            time.sleep(_ASK_AGAIN_S)
        except SlurmError as error:
            job = client.jobs([job_id]).get(job_id)
            if job is not None and job.state.waiting:  # Slurm itself was faster: a node went down
                break
            raise RunFailedError(f"Slurm does not requeue job {job_id}: {error}") from error
    time.sleep(_KILLED_WITHIN_S)
