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

__all__ = [
    "CLUSTER_VARIABLES",
    "CommandResult",
    "Runner",
    "check_configuration",
    "command_environment",
    "run_command",
]

CLUSTER_VARIABLES = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT"})
"""How the cluster is found; everything else of Slurm's in our environment would change what we ask."""

_DROPPED_PREFIXES = (
    "SLURM_",  # of a job that we run in: breaks submits from inside a job
    "SLURMD_",
    "SBATCH_",  # would overrule the script, and the script is what the plan says
    "SALLOC_",
    "SRUN_",
    "SQUEUE_",  # formats and filters of a user's interactive commands
    "SACCT_",
    "SCANCEL_",
    "SCONTROL_",
    "SINFO_",
)


class CommandResult(NamedTuple):
    """What a command said."""

    exit_code: int
    stdout: str
    stderr: str


class Runner(Protocol):
    """Runs a command and returns what it said, whatever its exit code.

    Raises
    ------
    SlurmMissingError
        The program does not exist.
    SlurmUnavailableError
        It did not end in time, and is gone when this is raised; or the ``slurm.conf`` it was to read is not there.
    """

    def __call__(self, argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float) -> CommandResult: ...


def command_environment(*, conf: Path | None, reading: bool, cluster: str | None = None) -> dict[str, str]:
    """The environment of a Slurm command.

    Parameters
    ----------
    conf:
        ``slurm.conf`` of the cluster; None leaves it to ``SLURM_CONF`` and Slurm's own search.
    cluster:
        Which of several clusters is asked; empty for the one of the configuration. None leaves it to
        ``SLURM_CLUSTERS``.
    reading:
        The answer will be parsed: English messages, and times as seconds since the epoch. A submission must not
        have this, because ``sbatch`` hands its environment on to the job.
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
    """See that the ``slurm.conf`` can be read which a command would take: Slurm itself looks for it for a minute.

    Parameters
    ----------
    conf:
        Its name; None for what ``SLURM_CONF`` says. Where neither does, Slurm finds it by itself.

    Raises
    ------
    NoConfigurationError
        There is no such file, or it may not be read.
    """
    conf = str(conf or os.environ.get("SLURM_CONF", ""))
    if conf and not os.access(conf, os.R_OK):
        raise NoConfigurationError(
            f"SLURM_CONF is {conf}, which {'may not be read by you' if os.path.exists(conf) else 'is not there'}\n"
            "    hint: unset SLURM_CONF, or let it name the slurm.conf of your cluster; a run that was submitted stays "
            "with the one it was submitted with"
        )


def run_command(argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float) -> CommandResult:
    """The real `Runner`. The command is in a process group of its own and killed whole at the time-out.

    Raises
    ------
    SlurmMissingError
        There is no such command on this machine.
    SlurmUnavailableError
        It gave no answer in ``timeout_s`` seconds.
    NoConfigurationError
        The ``SLURM_CONF`` of ``env`` is not there, or may not be read.
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
            # names and comments of other people's jobs may hold anything
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
            os.killpg(process.pid, signal.SIGKILL)  # our own unreaped child: the id cannot be another's
            raise SlurmUnavailableError(f"{in_short(argv)} gave no answer in {timeout_s:g} s") from None
        except BaseException:
            # the call that was interrupted may have waited for its end: the id may be another's then, or nobody's
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            raise
    return CommandResult(process.returncode, stdout, stderr)
