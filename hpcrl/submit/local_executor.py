"""The submitit executor of the local machine, made fit for runs of days."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from submitit.local.local import LocalExecutor, LocalJob

from hpcrl.processes.interpreter import module_command, with_safe_path
from hpcrl.slurm.scripts import batch_process

#: keeps controllers that we started from being collected while they run; also collects them when they end
_controllers: list[subprocess.Popen[bytes]] = []

_MARGIN_S = 120
"""The supervisor ends the run at its limit; submitit's controller, which kills hard, comes this much later."""


class DetachedLocalExecutor(LocalExecutor):
    """Local executor of submitit, with a controller that outlives the terminal.

    It differs from the stock executor in five things. The controller is in a session of its own, so that a
    terminal's Ctrl-C or hang-up does not reach it (the stock one then kills the job after a second). Its output
    goes to a file, not to a pipe that a reader waits on. Its time limit is the plan's. And
    ``CUDA_VISIBLE_DEVICES`` stays what the caller has: the stock one hides all GPUs by default. Nothing is
    imported from the working directory.

    Parameters
    ----------
    folder:
        Directory of submitit's files.
    time_limit_s:
        Limit of the run; submitit's is a little later.
    environment:
        Additional variables of the job.
    command:
        Command that replaces `batch_process` of the folder, where that needs a wrapper.
    """

    def __init__(
        self,
        folder: Path,
        *,
        time_limit_s: float,
        environment: Mapping[str, str],
        command: Sequence[str] | None = None,
    ) -> None:
        super().__init__(folder)
        self._command = batch_process(self.folder) if command is None else list(command)
        self._time_limit_s = time_limit_s
        self._environment = dict(environment)

    @property
    def _submitit_command_str(self) -> str:
        return shlex.join(self._command)

    def _submit_command(self, command: str) -> LocalJob[Any]:
        env = {
            **os.environ,
            **self._environment,
            # the interface of submitit.local.local.Controller
            "SUBMITIT_LOCAL_NTASKS": "1",
            "SUBMITIT_LOCAL_COMMAND": command,
            "SUBMITIT_LOCAL_TIMEOUT_S": str(int(self._time_limit_s) + _MARGIN_S),
            "SUBMITIT_LOCAL_SIGNAL_DELAY_S": "30",
            "SUBMITIT_LOCAL_NODEID": "0",
            "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
            "SUBMITIT_STDERR_TO_STDOUT": "",
            "SUBMITIT_EXECUTOR": "local",
            "SUBMITIT_LOCAL_WITH_SHELL": "",
        }
        folder = Path(self.folder)
        with (folder / "controller.log").open("ab") as log:
            process = subprocess.Popen(
                module_command(sys.executable, "submitit.local._local", str(folder)),
                env=with_safe_path(env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        _controllers[:] = [process, *(other for other in _controllers if other.poll() is None)]
        return LocalJob(folder=folder, job_id=str(process.pid), process=process, tasks=[0])
