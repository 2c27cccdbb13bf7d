"""A small job of a command that waits for it: submitted, followed, and cancelled where the command ends first.

The job's files are in a directory of its own below the runs root, because nodes must see them.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from hpcrl.config.cluster import SlurmCluster
from hpcrl.errors import DeadlineError
from hpcrl.processes.interpreter import module_command
from hpcrl.slurm.client import SlurmClient
from hpcrl.slurm.directives import output_pattern
from hpcrl.slurm.errors import SlurmError
from hpcrl.slurm.render import render_script
from hpcrl.slurm.states import JobState
from hpcrl.storage.files import atomic_write

_NAME = "hpcrl-check"
_LOG = "log"
_POLL_S = 1.0
_LAST_LINES = 10
"""Maximum number of lines of a job's log in a message."""


class SmallJob(NamedTuple):
    """Request for a job.

    Attributes
    ----------
    directory:
        Directory of its files (`job_directory`).
    module:
        Module of hpcrl that is the batch process; its argument is the directory.
    options:
        Options of sbatch that choose nodes and time.
    label:
        What it asks for, in words: ``2 nodes of gpu``.
    wait_s:
        Maximum wait in seconds: until the job has ended or, with ``run_s``, until it has begun.
    run_s:
        Maximum seconds between its begin and its end.
    """

    directory: Path
    module: str
    options: Sequence[str]
    label: str
    wait_s: float
    run_s: float | None = None


class EndedJob(NamedTuple):
    """A job that has ended: its number, its final state, and Slurm's names of its nodes."""

    job_id: int
    state: JobState
    nodes: list[str]


class _Overdue(NamedTuple):
    """A job whose time is over: what it has not done, and a hint."""

    what: str
    hint: str


@contextlib.contextmanager
def job_directory(root: Path) -> Iterator[Path]:
    """Make a directory for the files of a job below the runs root, and remove it at the end."""
    directory = root / f".hpcrl-check-{secrets.token_hex(4)}"
    directory.mkdir(parents=True)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def render_small_job(cluster: SlurmCluster, job: SmallJob) -> str:
    """Return the script of a job, with the environment that the profile gives to jobs.

    UsageError where its directory has a backslash or a line break, which Slurm cannot be given.
    """
    # append: what a step writes into the same file stays
    output = output_pattern(job.directory / _LOG)
    options = [f"--output={output}", "--open-mode=append", "--export=ALL", "--no-requeue", *job.options]
    command = module_command(sys.executable, job.module, str(job.directory))
    return render_script("check", cluster, options=[options], command=command, cluster=cluster.name)


def run_small_job(
    cluster: SlurmCluster, job: SmallJob, *, client: SlurmClient, say: Callable[[str], None] = lambda text: None
) -> EndedJob:
    """Submit a job and wait for its end. It is cancelled where the wait ends first, also by an interrupt.

    Parameters
    ----------
    say:
        Takes lines on what becomes of the job.

    Raises
    ------
    DeadlineError
        The job has not begun, or not ended, in time; the message says whether it was cancelled.
    SlurmError
        Slurm refuses the job, or does not answer.
    """
    script = job.directory / "check.sbatch"
    atomic_write(script, render_small_job(cluster, job).encode())
    job_id: int | None = None
    try:
        job_id = client.submit(script, name=_NAME, token=job.directory.name).job_id
        say(f"job {job_id} asks {job.label}")
        ended = _follow(client, job_id, job, say)
    except BaseException as error:
        if job_id is not None:
            say(f"job {job_id}: {_cancel(client, job_id)}")
        elif isinstance(error, KeyboardInterrupt):
            # sbatch may have been interrupted after the controller took the job
            with contextlib.suppress(SlurmError):
                for found in client.find(name=_NAME, token=job.directory.name):
                    say(f"job {found.job_id}: {_cancel(client, found.job_id)}")
        raise
    if isinstance(ended, EndedJob):
        return ended
    raise DeadlineError(f"the check's job {job_id} {ended.what}; {_cancel(client, job_id)}\n    hint: {ended.hint}")


def _follow(client: SlurmClient, job_id: int, job: SmallJob, say: Callable[[str], None]) -> EndedJob | _Overdue:
    """Wait for the end of a job, or for the end of the time that it has."""
    asked = time.monotonic()
    deadline, begun = asked + job.wait_s, False
    last = JobState.UNKNOWN.value
    while True:
        found = client.jobs([job_id]).get(job_id)
        if found is not None:
            if found.state.ended:
                return EndedJob(job_id, found.state, found.nodes)
            last = found.state.value + (f" ({found.reason})" if found.reason else "")
            if found.state is JobState.RUNNING and not begun:
                begun = True
                say(f"job {job_id} runs on {', '.join(found.nodes)} after {time.monotonic() - asked:.0f} s")
                if job.run_s is not None:
                    deadline = time.monotonic() + job.run_s
        if time.monotonic() >= deadline:
            break
        time.sleep(_POLL_S)
    if not begun:
        what = f"was still in the queue after {job.wait_s:g} s; last seen: {last}"
        return _Overdue(what, "`squeue --start` shows when jobs begin; --wait with more seconds, when nodes are free")
    if job.run_s is not None:
        return _Overdue(f"has not ended within {job.run_s:g} s; last seen: {last}", "its node may hang: sinfo -N -l")
    what = f"has not ended within {job.wait_s:g} s; last seen: {last}"
    return _Overdue(what, "--wait with more seconds, when nodes are free")


def _cancel(client: SlurmClient, job_id: int) -> str:
    """Cancel a job; returns what became of it, a sentence on ``it``."""
    try:
        client.cancel(job_id)
    except SlurmError as error:
        reason = str(error).partition("\n")[0]
        return f"it could not be cancelled and continues (`scancel {job_id}` ends it): {reason}"
    return "it was cancelled"


def find_file(directory: Path, name: str, *, late_s: float) -> Path | None:
    """Return a file that another node has written, once its name is visible here; None after ``late_s`` seconds.

    The directory is listed: NFS keeps the answer to an earlier lookup of the name.
    """
    deadline = time.monotonic() + late_s
    while name not in os.listdir(directory):
        if time.monotonic() > deadline:
            return None
        time.sleep(_POLL_S)
    return directory / name


def end_of_log(directory: Path) -> str:
    """Return the last lines of a job's log, each indented and on its own line."""
    log = directory / _LOG
    words = log.read_text(errors="replace").strip().splitlines()[-_LAST_LINES:] if log.is_file() else []
    return "\n".join(f"    {line}" for line in words or ["it wrote no log"])
