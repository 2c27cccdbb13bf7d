"""Running one of Slurm's commands: argument list, environment, time-out. The seam where tests put a fake."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from hpcrl.slurm.errors import NoConfigurationError, SlurmMissingError, SlurmUnavailableError, in_short

CLUSTER_VARIABLES = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT"})
"""Variables that locate the cluster; all other variables of Slurm in the environment would change a query."""

_DROPPED_PREFIXES = (
    "SLURM_",  # of the job that this process runs in; it would break submits from inside a job
    "SLURMD_",
    "SBATCH_",  # would override the script, which follows the plan
    "SALLOC_",
    "SRUN_",
    "SQUEUE_",  # formats and filters of a user's interactive commands
    "SACCT_",
    "SCANCEL_",
    "SCONTROL_",
    "SINFO_",
)


class CommandResult(NamedTuple):
    """Result of a command."""

    exit_code: int
    stdout: str
    stderr: str


class Runner(Protocol):
    """Runs a command and returns its output, whatever its exit code.

    Raises
    ------
    SlurmMissingError
        The program does not exist.
    SlurmUnavailableError
        It did not end in time, and was killed; or its ``slurm.conf`` does not exist.
    """

    def __call__(self, argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float) -> CommandResult: ...


def command_environment(*, conf: Path | None, reading: bool, cluster: str | None = None) -> dict[str, str]:
    """Return the environment of a Slurm command.

    Parameters
    ----------
    conf:
        ``slurm.conf`` of the cluster; None leaves it to ``SLURM_CONF`` and Slurm's own search.
    cluster:
        Name of the cluster among several; empty for the one of the configuration. None leaves it to ``SLURM_CLUSTERS``.
    reading:
        The answer will be parsed: English messages, and times as seconds since the epoch. A submission must not have
        this, because ``sbatch`` passes its environment on to the job.
    """
    env = {k: v for k, v in os.environ.items() if k in CLUSTER_VARIABLES or not k.startswith(_DROPPED_PREFIXES)}
    if conf is not None:
        env["SLURM_CONF"] = str(conf)
    if cluster is not None:
        env.pop("SLURM_CLUSTERS", None)
        env |= {"SLURM_CLUSTERS": cluster} if cluster else {}
    if reading:
        env |= {"LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"}
    return env


def check_configuration(conf: Path | str | None) -> None:
    """Raise NoConfigurationError where the ``slurm.conf`` of a command is unreadable: Slurm would retry for a minute.

    Parameters
    ----------
    conf:
        Its path; None for ``SLURM_CONF``. Without both, Slurm finds its configuration by itself.

    Raises
    ------
    NoConfigurationError
        The file does not exist, or is not readable.
    """
    conf = str(conf or os.environ.get("SLURM_CONF", ""))
    if conf and not os.access(conf, os.R_OK):
        raise NoConfigurationError(
            f"SLURM_CONF is {conf}, which {'may not be read by you' if os.path.exists(conf) else 'does not exist'}\n"
            "    hint: unset SLURM_CONF, or let it name the slurm.conf of your cluster; a run that was submitted stays "
            "with the one it was submitted with"
        )


def run_command(argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float) -> CommandResult:
    """Run a command; the real `Runner`.

    The command has its own process group, which is killed at the timeout.

    Raises
    ------
    SlurmMissingError
        The command is not installed on this machine.
    SlurmUnavailableError
        It gave no answer in ``timeout_s`` seconds.
    NoConfigurationError
        The ``SLURM_CONF`` of ``env`` does not exist, or is not readable.
    """
    check_configuration(env.get("SLURM_CONF"))
    try:
        process = subprocess.Popen(
            argv,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # names and comments of other users' jobs may contain any bytes
            encoding="utf-8",
            errors="replace",
            process_group=0,
        )
    except FileNotFoundError:
        raise SlurmMissingError(argv[0]) from None
    with process:
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # an unreaped child: its id cannot be reused
            raise SlurmUnavailableError(f"{in_short(argv)} gave no answer in {timeout_s:g} s") from None
        except BaseException:
            # the interrupted call may have reaped the process: its id may then be reused
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            raise
    return CommandResult(process.returncode, stdout, stderr)
