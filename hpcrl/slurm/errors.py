"""What can go wrong between us and Slurm.

::

    SlurmError                      base; carries the command and what it said
    ├── SlurmMissingError           Slurm's commands are not installed here (exit code 2)
    ├── NoClusterError              they are, and belong to no cluster (exit code 2)
    ├── SlurmUnavailableError       the controller did not answer; a warning for a watcher, never the end of a job
    │   ├── NoConfigurationError    the slurm.conf that is named cannot be read (exit code 2)
    │   └── SubmitUnclearError      a submission got no answer and could not be looked up
    ├── SlurmRejectedError          Slurm understood and said no (exit code 2)
    ├── NoSuchJobError              the controller does not know the job (any more)
    ├── NoAccountingError           this cluster keeps no accounting
    └── SlurmAnswerError            the answer could not be read

`classify` makes one of them from what a command said.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from hpcrl.errors import ExitCode, HpcrlError

__all__ = [
    "NoAccountingError",
    "NoClusterError",
    "NoConfigurationError",
    "NoSuchJobError",
    "SlurmAnswerError",
    "SlurmError",
    "SlurmMissingError",
    "SlurmRejectedError",
    "SlurmUnavailableError",
    "SubmitUnclearError",
    "classify",
    "in_short",
]


class SlurmError(HpcrlError):
    """A Slurm command failed."""


class SlurmMissingError(SlurmError):
    """A Slurm command is not installed on this machine."""

    exit_code = ExitCode.USAGE

    def __init__(self, program: str) -> None:
        super().__init__(
            f"Slurm's command {program!r} is not on this machine\n"
            "    hint: run hpcrl on a login node, or load the site's Slurm module; to try without a cluster, see "
            "`hpcrl devcluster up --help`"
        )


class NoClusterError(SlurmError):
    """Slurm's commands are installed, but no configuration says which cluster they belong to."""

    exit_code = ExitCode.USAGE


class SlurmUnavailableError(SlurmError):
    """The controller (or the accounting daemon) did not answer in time. What it knows is unknown, not gone."""


class NoConfigurationError(SlurmUnavailableError):
    """The ``slurm.conf`` that is named cannot be read: for a watcher a warning, as its filesystem may come back."""

    exit_code = ExitCode.USAGE


class SubmitUnclearError(SlurmUnavailableError):
    """A submission got no answer, and whether it was taken is not known. Submitting again looks it up first."""


class SlurmRejectedError(SlurmError):
    """Slurm understood what was asked and refused it."""

    exit_code = ExitCode.USAGE


class NoSuchJobError(SlurmError):
    """The controller does not know the job: it never existed, or ended longer ago than ``MinJobAge``."""


class NoAccountingError(SlurmError):
    """The cluster has no accounting, so ``sacct`` and ``sacctmgr`` have nothing to say."""


class SlurmAnswerError(SlurmError):
    """A command succeeded and said something that could not be read."""


_SHOWN = 80
"""So much of a command is shown to a person, in characters: lists of columns and of jobs are longer."""


def in_short(argv: Sequence[str]) -> str:
    """A command as a person would recognize it."""
    words = list(argv)
    while len(words) > 1 and len(shlex.join(words)) > _SHOWN:
        words.pop()
    return shlex.join(words) + (" ..." if len(words) < len(argv) else "")


_AWAY = (
    "unable to contact slurm controller",
    "slurm controller not responding",
    "socket timed out",
    "connection refused",
    "connection reset",
    "connection timed out",
    "transport endpoint is not connected",
    "zero bytes were transmitted",
    "unable to connect",
    "standby mode",
    "resource temporarily unavailable",
    "problem talking to the database",
    "unable to establish connection",
    "communication connection failure",
    "unexpected message received",
    "slurm temporarily unable to accept job",
    "munge encode failed",  # munged is away on this machine
)
"""Parts of messages (lower case) that mean: nobody answered. From slurm_errno.c and src/api, 22.05 to 25.11."""

_NO_CLUSTER = ("could not establish a configuration source",)
_NO_JOB = ("invalid job id", "job not found")
_NO_ACCOUNTING = ("accounting storage is disabled", "not running a supported accounting_storage plugin")


def classify(argv: Sequence[str], exit_code: int, said: str) -> SlurmError:
    """The error of a failed command, by what it said (standard error and output together)."""
    text = said.strip()
    low = text.lower()
    if any(part in low for part in _NO_CLUSTER):
        return NoClusterError(
            f"Slurm's commands are installed on this machine, but it belongs to no cluster ({argv[0]}: no slurm.conf)\n"
            "    hint: run hpcrl on a login node, or set SLURM_CONF; to try without a cluster: hpcrl devcluster up"
        )
    kind: type[SlurmError] = SlurmRejectedError
    if any(part in low for part in _NO_ACCOUNTING):
        kind = NoAccountingError
    elif any(part in low for part in _AWAY):
        kind = SlurmUnavailableError
    elif any(part in low for part in _NO_JOB):
        kind = NoSuchJobError
    return kind(f"{in_short(argv)} failed ({exit_code}): {text or 'it said nothing'}")
