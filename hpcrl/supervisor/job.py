"""What submitit runs: one callable with plain arguments, the same on this machine and under Slurm."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from pathlib import Path

from submitit.core.utils import DelayedSubmission

from hpcrl.errors import RunDirError, RunFailedError
from hpcrl.runs.record import RunRecord
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunState, RunStatus
from hpcrl.supervisor.launcher import LocalLauncher
from hpcrl.supervisor.step_launcher import StepLauncher
from hpcrl.supervisor.supervisor import Supervisor

__all__ = ["Supervise"]


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
        if status is not None and not status.state.ended and status.supervisor_alive(time.time()):
            raise RunDirError(f"{run.name} is supervised by pid {status.supervisor.pid} on {status.supervisor.host}")

        async def supervise() -> tuple[RunState, str]:
            launcher = LocalLauncher() if plan.layout.kind == "local" else StepLauncher(run.cluster())
            supervisor = Supervisor(run, run_id=record.run_id, plan=plan, launcher=launcher)
            state, cause = await supervisor.run()
            return state, "" if cause is None else cause.message

        state, message = asyncio.run(supervise())
        if state is not RunState.COMPLETED:
            raise RunFailedError(f"{run.name}: {state}: {message}")
        return state.value

    def checkpoint(self) -> DelayedSubmission:
        """What submitit hands to the next attempt where Slurm's warning comes before we listen to it ourselves."""
        return DelayedSubmission(self)
