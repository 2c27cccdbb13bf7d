"""The submitit executor of Slurm sites: our scripts, our client, one supervisor."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from submitit.core.core import PicklingExecutor
from submitit.slurm.slurm import SlurmJob

from hpcrl.interpreter import module_command

__all__ = ["SlurmExecutor", "batch_command", "batch_process"]

SubmitCommand = Callable[[Sequence[str]], int]
"""Submits the job whose batch process is this command; returns the id of the (leading) job."""


class SlurmExecutor(PicklingExecutor):
    """submitit's part of a submit: the pickle of the supervisor, and the command that runs it.

    It differs from the stock executor in three things. The script is ours (heterogeneous jobs, a clean environment,
    USR2 to the batch process only), and the supervisor *is* the batch process, not a step. Slurm is asked by our
    client, which submits once however often it is called. And the time limit that submitit believes in is the plan's.

    Parameters
    ----------
    folder:
        Where submitit keeps its files; visible from the nodes.
    submit:
        Submits a job with the given batch process.
    time_limit_s:
        Limit of the job.
    """

    job_class = SlurmJob

    def __init__(self, folder: Path, *, submit: SubmitCommand, time_limit_s: float) -> None:
        # a requeue at the time limit is no failure: how many there may be is for the supervisor to say
        super().__init__(folder, max_num_timeout=1 << 30)
        self._submit = submit
        self.parameters["timeout_min"] = max(1, int(time_limit_s // 60))

    @property
    def _submitit_command_str(self) -> str:
        return shlex.join(batch_process(self.folder))

    def _submit_command(self, command: str) -> SlurmJob[Any]:
        return SlurmJob(folder=self.folder, job_id=str(self._submit(shlex.split(command))), tasks=[0])

    # the abstract rest is about files and answers of sbatch, which are not submitit's here

    def _num_tasks(self) -> int:
        return 1

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        raise NotImplementedError

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        raise NotImplementedError

    @staticmethod
    def _get_job_id_from_submission_command(string: bytes | str) -> str:
        raise NotImplementedError


def batch_process(folder: Path | str) -> list[str]:
    """What runs the supervisor that submitit has pickled into ``folder``."""
    return module_command(sys.executable, "submitit.core._submit", str(folder), unbuffered=True)


def batch_command(command: Sequence[str], variables: dict[str, str]) -> list[str]:
    """A command with variables set for it alone, as the script's last line: ``env`` becomes the command."""
    return ["env", *(f"{name}={value}" for name, value in variables.items()), *command]
